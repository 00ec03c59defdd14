"""Threads, events and queues as a parameter, so that a simulator can run their users in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, slots=True)
class Threads:
    """Starts daemon threads (by their target and name) and creates their events and queues."""

    start: Callable[[Callable[[], object], str], None] = lambda target, name: threading.Thread(
        target=target, name=name, daemon=True
    ).start()
    event: Callable[[], threading.Event] = lambda: threading.Event()  # looked up at each call
    queue: Callable[[], SimpleQueue[Any]] = lambda: SimpleQueue()


SYSTEM_THREADS = Threads()
