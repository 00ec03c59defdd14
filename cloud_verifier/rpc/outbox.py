"""The way of an answer: from the engine to the event loop, then to a client that may not read it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Mailbox:
    """Calls into an event loop: at once on its own thread, else those of one moment wake the loop once.

    Made on the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awake = False

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """`callback(*args)` on the loop, in the order of the posts. Any thread; a closed loop raises."""
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


class UnreadError(Exception):
    """A client left too much unread."""


class Outbox:
    """Messages for one call, in order, of which its client may leave `max_bytes` unread. One task takes them.

    An `asyncio.Queue` would do the same at three times the cost, for every message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Raises `UnreadError` when it is full; a single message always fits."""
        if self._num_bytes and self._num_bytes + len(message) > self._max_bytes:
            raise UnreadError(f"{self._num_bytes} bytes of answers were not read")
        self._num_bytes += len(message)
        self._append(message)

    def end(self) -> None:
        """`get` returns None once everything put before was taken."""
        self._append(None)

    def _append(self, message: bytes | None) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> bytes | None:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        if message is not None:
            self._num_bytes -= len(message)
        return message
