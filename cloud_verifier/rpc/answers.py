"""The answers that one streaming call still has to send, to a client that may not read them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from outrider.cloud_verifier.engine.delivery import Delivery

log = logging.getLogger(__name__)


class UnreadError(Exception):
    """Raised where a client leaves too many bytes unread."""


class Answers:
    """Queues serialised messages for one call, of which its client may leave `max_unread_bytes` unread.

    Made in the call's own task, which takes them. Lives on the event loop. An `asyncio.Queue` would do the
    same at three times the cost, for every message.
    """

    def __init__(self, max_unread_bytes: int, delivery: Delivery) -> None:
        """`delivery` counts the writes."""
        self.error: Exception | None = None  # how the call ends, where it does not end well
        self._max_unread_bytes, self._delivery = max_unread_bytes, delivery
        self._num_bytes = 0
        self._messages: deque[bytes | None] = deque()  # None is the end
        self._waiter: asyncio.Future[None] | None = None
        self._writer = asyncio.current_task()

    def put(self, message: bytes) -> None:
        """Queues a message. Raises `UnreadError` where too much is unread; a single message always fits."""
        if self._num_bytes and self._num_bytes + len(message) > self._max_unread_bytes:
            most = f"at most {self._max_unread_bytes} may wait (--max-unread-bytes)"
            raise UnreadError(f"{self._num_bytes} bytes of answers were not read in time; {most}")
        self._num_bytes += len(message)
        self._append(message)

    def end(self, error: Exception | None = None) -> None:
        """Ends the call after what was put before."""
        if error is not None:
            self.error = error
        self._append(None)

    def cut_off(self, error: Exception) -> None:
        """Ends the call at once, even where it waits in a write that nobody takes, and drops what was put."""
        self.error = error
        self._messages.clear()  # gRPC keeps the error, whose traceback leads here, until the client takes it
        if self._writer is not None:
            self._writer.cancel()

    async def write_to(self, context: Any, on_written: Callable[[], object] | None = None) -> None:
        """Writes messages until the end, and calls `on_written` after each. Raises `error`."""
        try:
            while (message := await self._get()) is not None:
                with self._delivery.writing():
                    is_written = await _was_written(context, message)
                if not is_written:
                    return
                if on_written is not None:
                    on_written()
        except asyncio.CancelledError:
            if self.error is None:
                raise
            _survive_cancel()
        if self.error is not None:
            raise self.error

    def _append(self, message: bytes | None) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _get(self) -> bytes | None:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        if message is not None:
            self._num_bytes -= len(message)
        return message


async def _was_written(context: Any, message: bytes) -> bool:
    """Writes a message, and returns whether the call was still there."""
    try:
        await context.write(message)
    except Exception as gone:  # gRPC's own kind, which it does not export, where its client is gone meanwhile
        if not context.done():
            raise
        log.debug("a client left before an answer was written: %s", gone)
        return False
    return True


def _survive_cancel() -> None:
    """Lets the running task go on: we cancelled it ourselves, to get it out of a write."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
