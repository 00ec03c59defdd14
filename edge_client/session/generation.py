"""Runs one session on a thread of its own, for readers on an event loop or on another thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from outrider.common.errors import OutriderError
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.unverified import buffer_unverified
from outrider.edge_client.session.session import EdgeSession

log = logging.getLogger(__name__)


class _GenerationThread(ABC):
    """Keeps the events until they are read; they are bounded by the length of the text that was asked for.

    Where the session `is_reverified`, events of unverified tokens are held until they are verified. `on_end` is
    called on the session's thread once both sides have forgotten the session, before a reader sees the end.
    """

    def __init__(self, session: EdgeSession, is_reverified: bool, on_end: Callable[[], None]) -> None:
        self.session = session
        self._is_reverified = is_reverified
        self._on_end = on_end
        self._lock = threading.Lock()
        self._waiting: list[SessionEvent] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="edge-generation", daemon=True)

    def cancel(self) -> None:
        """Ends the session soon, and closes it at the verifier. Harmless when it is over. Safe in any thread."""
        self.session.cancel()

    def _take(self) -> tuple[list[SessionEvent], bool]:
        """Returns the events since the last call, and whether none follow. Raises what the session raised, after
        the events before it."""
        with self._lock:
            batch, self._waiting = self._waiting, []
            is_over = self._is_over
        if is_over and not batch and self._failure is not None:
            raise self._failure
        return batch, is_over

    def _run(self) -> None:
        try:
            events = self.session.generate()
            for event in buffer_unverified(events) if self._is_reverified else events:
                self._put(event)
        except OutriderError as error:
            self._failure = error
        except Exception as error:
            log.exception("a generation failed")
            self._failure = error
        finally:
            self._on_end()
            with self._lock:
                self._is_over = True
            self._announce_end()

    def _put(self, event: SessionEvent) -> None:
        with self._lock:
            self._waiting.append(event)
            is_first = len(self._waiting) == 1
        if is_first:  # else the reader is told already
            self._announce()

    @abstractmethod
    def _announce(self) -> None:
        """Tells the reader that there are events."""

    @abstractmethod
    def _announce_end(self) -> None:
        """Tells the reader that no more events will come."""


def _nothing() -> None:
    pass


class Generation(_GenerationThread):
    """Is read on the event loop that made it. Starts at once."""

    def __init__(
        self, session: EdgeSession, is_reverified: bool = False, on_end: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(session, is_reverified, on_end)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._thread.start()

    async def next_batch(self) -> list[SessionEvent]:
        """Returns all events since the last call, once there is one; an empty list at the end. Raises what
        the session raised, after the events before it."""
        while True:
            self._news.clear()
            batch, is_over = self._take()
            if batch or is_over:
                return batch
            await self._news.wait()

    async def ended(self) -> None:
        """Returns when the thread is done and both sides have forgotten the session."""
        await self._ended.wait()

    def _announce(self) -> None:
        self._tell(self._news.set)

    def _announce_end(self) -> None:
        self._tell(self._finish)

    def _finish(self) -> None:
        self._news.set()
        self._ended.set()

    def _tell(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            pass


class BlockingGeneration(_GenerationThread):
    """Is read on any one thread at a time. Starts at once."""

    def __init__(
        self, session: EdgeSession, is_reverified: bool = False, on_end: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(session, is_reverified, on_end)
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread.start()

    def next_batch(self) -> list[SessionEvent]:
        """Returns and raises what `Generation.next_batch` does."""
        while True:
            self._news.clear()
            batch, is_over = self._take()
            if batch or is_over:
                return batch
            self._news.wait()

    def ended(self) -> None:
        """Returns when both sides have forgotten the session."""
        self._ended.wait()

    def _announce(self) -> None:
        self._news.set()

    def _announce_end(self) -> None:
        self._news.set()
        self._ended.set()
