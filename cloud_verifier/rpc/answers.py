"""What one streaming call still has to say, to a client that may not read it."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.cloud_verifier.rpc.outbox import Outbox


class Answers:
    """Made in the call's own task. Lives on the event loop."""

    def __init__(self, max_unread_bytes: int) -> None:
        self.error: Exception | None = None  # how the call ends, where it does not end well
        self._outbox = Outbox(max_unread_bytes)
        self._writer = asyncio.current_task()

    def put(self, message: bytes) -> None:
        """A serialised message. Raises `UnreadError` where the client has left too much unread."""
        self._outbox.put(message)

    def end(self, error: Exception | None = None) -> None:
        """The call ends after what was put before."""
        if error is not None:
            self.error = error
        self._outbox.end()

    def cut_off(self, error: Exception) -> None:
        """The call ends at once, though it be stuck in a write that nobody takes."""
        self.error = error
        if self._writer is not None:
            self._writer.cancel()

    async def write_to(self, context: Any) -> None:
        """Until the end. Raises `error`."""
        try:
            while (message := await self._outbox.get()) is not None:
                await context.write(message)
        except asyncio.CancelledError:
            if self.error is None:
                raise
            _survive_cancel()
        if self.error is not None:
            raise self.error


def _survive_cancel() -> None:
    """The running task was cancelled by us, to get it out of a write; it goes on."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
