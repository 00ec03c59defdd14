"""Runs one session on a thread of its own and brings its events to the event loop in batches."""

from __future__ import annotations

import asyncio
import logging
import threading

from outrider.common.errors import OutriderError
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.unverified import buffer_unverified
from outrider.edge_client.session.session import EdgeSession

log = logging.getLogger(__name__)


class Generation:
    """Starts the session's thread at once. `next_batch` and `ended` are for the loop that made it; `cancel`
    may be called from any thread.

    Unread events are bounded by the length of the text that was asked for. Where the session `is_reverified`,
    events of unverified tokens are held until they are verified.
    """

    def __init__(self, session: EdgeSession, is_reverified: bool = False) -> None:
        self.session = session
        self._is_reverified = is_reverified
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[SessionEvent] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="edge-generation", daemon=True)
        self._thread.start()

    async def next_batch(self) -> list[SessionEvent]:
        """Returns all events since the last call, once there is one; an empty list at the end. Raises what
        the session raised, after the events before it."""
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                is_over = self._is_over
                self._news.clear()
            if batch:
                return batch
            if is_over:
                if self._failure is not None:
                    raise self._failure
                return []
            await self._news.wait()

    def cancel(self) -> None:
        """Ends the session soon, and closes it at the verifier. Harmless when it is over."""
        self.session.cancel()

    async def ended(self) -> None:
        """Returns when the thread is done and both sides have forgotten the session."""
        await self._ended.wait()

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
            with self._lock:
                self._is_over = True
            self._tell(self._finish)

    def _put(self, event: SessionEvent) -> None:
        with self._lock:
            self._waiting.append(event)
            is_first = len(self._waiting) == 1
        if is_first:  # else the loop is told already
            self._tell(self._news.set)

    def _finish(self) -> None:
        self._news.set()
        self._ended.set()

    def _tell(self, what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed: nobody is left to tell
            pass
