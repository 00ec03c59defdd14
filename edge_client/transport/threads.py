"""Threads, events and queues as a parameter, so that a simulator can run their users in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol


class Threads(Protocol):
    """Creates what `threading` and `queue` do."""

    def start(self, function: Callable[..., object], *args: object, name: str) -> None:
        """Runs `function(*args)` in the background; the process does not wait for its end."""
        ...

    def event(self) -> threading.Event:
        """Returns a new event, not set."""
        ...

    def queue(self) -> SimpleQueue[Any]:
        """Returns a new queue for one reader."""
        ...


class SystemThreads:
    """Creates daemon threads and their events and queues."""

    def start(self, function: Callable[..., object], *args: object, name: str) -> None:
        threading.Thread(target=function, args=args, name=name, daemon=True).start()

    def event(self) -> threading.Event:
        return threading.Event()

    def queue(self) -> SimpleQueue[Any]:
        return SimpleQueue()


SYSTEM_THREADS = SystemThreads()
