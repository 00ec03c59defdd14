"""The queue between the threads that read a connection and the one thread that waits for messages."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from outrider.common.clock import Clock
from outrider.common.errors import OutriderError

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Queues messages with their times of arrival, errors and wake-ups. Written by any thread, read by one."""

    def __init__(self, clock: Clock) -> None:
        self.queued_s = 0.0  # how long the message last taken was queued
        self._now = clock.now
        self._items: SimpleQueue[tuple[Message, float] | OutriderError | None] = SimpleQueue()

    def put(self, message: Message) -> None:
        """Queues a message that arrived now."""
        self._items.put((message, self._now()))

    def fail(self, error: OutriderError) -> None:
        """Queues an error, which `take` raises."""
        self._items.put(error)

    def wake(self) -> None:
        """Ends a waiting `take` early. Safe in a signal handler."""
        self._items.put(None)

    def take(self, timeout_s: float) -> Message | None:
        """Returns the next message, or None after `timeout_s` or a `wake`. Raises an error that was queued."""
        try:
            item = self._items.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if item is None:
            return None
        if isinstance(item, OutriderError):
            raise item
        message, arrived_s = item
        self.queued_s = self._now() - arrived_s
        return message
