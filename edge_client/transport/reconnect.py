"""Connecting in the background, while the edge drafts on or waits.

Attempts overlap (hedged): the next one starts while earlier ones are under way, and the first to connect
wins. TCP repeats a lost SYN only after 1 s, so on a link that came back a fresh attempt connects first; on a
link with a long round trip the oldest does. A connection that is never taken never sends anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import LinkError, LinkFaultError, OutriderError
from outrider.edge_client.transport.breaker import CircuitBreaker
from outrider.edge_client.transport.link.base import Connection, VerifierLink
from outrider.edge_client.transport.threads import SYSTEM_THREADS, Threads

log = logging.getLogger(__name__)

# Most attempts are short: after an outage only the last ones count. Every fifth has time for a slow link.
_LONG_ATTEMPT_S, _SHORT_ATTEMPT_S = 4.0, 1.0
_LONG_ATTEMPT_EVERY = 5
# For the first connection, while nothing indicates that the link is bad: seconds to the next attempt.
_FIRST_INTERVALS_S = (0.5, 1.0, 2.0, 4.0)


class Reconnector:
    """Attempts to connect until one attempt succeeds; while `breaker` is open, at the breaker's interval.

    `on_ready` is called, on a background thread, once there is a connection to take.
    """

    def __init__(
        self,
        link: VerifierLink,
        breaker: CircuitBreaker,
        on_ready: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self._link = link
        self._breaker = breaker
        self._on_ready = on_ready
        self._clock = clock
        self._threads = threads
        self._connect_s = 0.0  # the duration of the last attempt that connected
        self._race: _Race | None = None

    def start(self) -> None:
        """Begins to connect, unless it already does or holds a connection that was not taken."""
        if self._race is None:
            self._race = _Race(
                self._link, self._breaker, self._connect_s, self._on_ready, self._clock, self._threads
            )
        else:
            self._race.hurry()

    @property
    def last_error(self) -> OutriderError | None:
        """Returns the error of the last attempt that failed."""
        return self._race.last_error if self._race else None

    @property
    def has_failed(self) -> bool:
        """Returns whether at some moment every attempt so far had failed, so that none was merely slow."""
        return self._race is not None and self._race.has_failed

    def take(self, timeout_s: float = 0.0) -> Connection | None:
        """Returns the connection, once; None when there is none within `timeout_s`."""
        if self._race is None:
            return None
        connection = self._race.take(timeout_s)
        if connection is not None:
            self._connect_s = self._race.connect_s
            self._race = None
        return connection

    def stop(self) -> None:
        """Starts no more attempts, and closes a connection that was not taken."""
        if self._race is not None:
            self._race.stop()
            self._race = None


class _Race:
    """The overlapping attempts of one reconnection: one thread starts them, each has its own."""

    def __init__(
        self,
        link: VerifierLink,
        breaker: CircuitBreaker,
        last_connect_s: float,
        on_ready: Callable[[], None],
        clock: Clock,
        threads: Threads,
    ) -> None:
        self.last_error: OutriderError | None = None
        self.has_failed = False
        self.connect_s = last_connect_s
        self._link = link
        self._breaker = breaker
        self._on_ready = on_ready
        self._clock = clock
        self._threads = threads
        self._timeouts_s = (
            max(_SHORT_ATTEMPT_S, 2 * last_connect_s),
            max(_LONG_ATTEMPT_S, 4 * last_connect_s),
        )
        self._ready: SimpleQueue[Connection] = threads.queue()
        self._lock = threading.Lock()
        self._is_over = False  # stopped, or there is a connection
        self._num_under_way = 0
        self._wake = threads.event()  # the next attempt need not wait for those under way
        threads.start(self._start_attempts, name="edge-link-reconnect")

    def hurry(self) -> None:
        if not self._breaker.is_closed:
            self._wake.set()

    def take(self, timeout_s: float) -> Connection | None:
        try:
            return self._ready.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None

    def stop(self) -> None:
        with self._lock:
            self._is_over = True
        self._wake.set()
        if (connection := self.take(0.0)) is not None:
            connection.close()

    def _start_attempts(self) -> None:
        for number in itertools.count():
            if number and self._breaker.is_closed:
                self._wake.wait(_FIRST_INTERVALS_S[min(number, len(_FIRST_INTERVALS_S)) - 1])
            self._clock.sleep(self._breaker.attempt_due_in_s)
            with self._lock:
                if self._is_over:
                    return
                self._num_under_way += 1
                self._wake.clear()
            self._breaker.record_attempt()
            timeout_s = self._timeouts_s[number % _LONG_ATTEMPT_EVERY == 0]
            self._threads.start(self._attempt, timeout_s, name="edge-link-attempt")

    def _attempt(self, timeout_s: float) -> None:
        start_s = self._clock.now()
        try:
            connection = self._link.connect(timeout_s)
        except LinkError as error:
            self._note_failure(error)
            return
        except Exception as error:  # a bug: the thread that waits for this one must learn of it
            log.exception("an attempt to connect to %s failed", self._link.address)
            self._note_failure(LinkFaultError(f"cannot connect to {self._link.address}: {error!r}"))
            return
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        self._wake.set()
        if not is_first:
            connection.close()
            return
        self.connect_s = self._clock.now() - start_s
        self._ready.put(connection)
        self._on_ready()

    def _note_failure(self, error: OutriderError) -> None:
        with self._lock:
            self._num_under_way -= 1
            is_last = not self._num_under_way
            self.last_error = error
            self.has_failed = self.has_failed or is_last
        if is_last:
            self._wake.set()
