"""Real-time priority, where the machine grants it: a link's timers must not wait for the models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LEVEL = 10


def ask_for_real_time() -> str:
    """Asks for the calling thread, and those it starts, to run before every ordinary one. Returns what it
    is now."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_LEVEL))
        return "real-time"
    return "ordinary"


@contextlib.contextmanager
def real_time() -> Iterator[None]:
    """Runs the thread before ordinary ones while the context lasts."""
    is_granted = ask_for_real_time() == "real-time"
    try:
        yield
    finally:
        if is_granted:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
