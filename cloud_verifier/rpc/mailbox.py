"""Replies on their way from the engine, on whatever thread its step ran, to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Mailbox:
    """Calls functions on an event loop: at once on its own thread, else those of one moment wake the loop once.

    Made on the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awake = False

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Calls `callback(*args)` on the loop, in the order of the posts. Any thread; a closed loop raises."""
        self._calls.append((callback, args))
        if threading.get_ident() == self._thread_id:
            self._deliver()
        elif not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_awake = False  # before the first call: what is posted meanwhile must not sleep
        while self._calls:
            callback, args = self._calls.popleft()
            try:
                callback(*args)
            except Exception:
                log.exception("an answer could not be handed on")
