"""A bounded watch on a session: one that hangs ends as a failure that says where every thread was."""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
import threading
from collections.abc import Iterator
from typing import Protocol


class Cancellable(Protocol):
    """Is what can be watched."""

    def cancel(self) -> None:
        """Ends it soon; from any thread."""
        ...


class HungError(AssertionError):
    """Is raised with the stacks of all threads, from when time was up."""


@contextlib.contextmanager
def watched(session: Cancellable, limit_s: float) -> Iterator[None]:
    """Cancels a session that is still at work after `limit_s`, and raises `HungError` once it has ended."""
    stacks: list[str] = []

    def bark() -> None:
        with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to descriptors alone
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks.append(file.read())
        session.cancel()

    timer = threading.Timer(limit_s, bark)
    timer.name, timer.daemon = "session-watch", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if stacks:
        raise HungError(f"a session was at work for more than {limit_s:g} s:\n{stacks[0]}")
