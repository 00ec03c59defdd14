"""Fresh connections in the background, while the edge goes on drafting or waits.

Attempts overlap (hedged): the next one begins while earlier ones are under way, and the first to connect
wins. A lost SYN is sent again by TCP only after 1 s, so of a link that came back a fresh attempt hears first;
on a link whose round trips take long it is the oldest. A connection that nobody takes never sends anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from outrider.common.errors import LinkError, LinkFaultError, OutriderError
from outrider.edge_client.transport.breaker import CircuitBreaker
from outrider.edge_client.transport.link.base import Connection, VerifierLink

log = logging.getLogger(__name__)

# Most attempts are short: after an outage only the last ones count. Each fifth has time for a slow link.
_LONG_S, _SHORT_S = 4.0, 1.0
_LONG_EVERY = 5
# While nothing says that the link is bad (the first connection): seconds to the next attempt beside.
_PATIENCE_S = (0.5, 1.0, 2.0, 4.0)


def _nobody() -> None:
    pass


class Prober:
    """Tries to connect until it has a connection: while `breaker` is open, as often as that says.

    `on_ready` is called, on a thread of its own, once there is a connection to take.
    """

    def __init__(
        self, link: VerifierLink, breaker: CircuitBreaker, on_ready: Callable[[], None] = _nobody
    ) -> None:
        self._link = link
        self._breaker = breaker
        self._on_ready = on_ready
        self._connect_s = 0.0  # what the last connection took
        self._run: _Run | None = None

    def start(self) -> None:
        """Begins to try, unless it already does or holds a connection nobody took."""
        if self._run is None:
            self._run = _Run(self._link, self._breaker, self._connect_s, self._on_ready)
        else:
            self._run.hurry()

    @property
    def last_error(self) -> OutriderError | None:
        return self._run.last_error if self._run else None

    @property
    def has_failed(self) -> bool:
        """Whether every attempt so far had failed at some moment: none of them was merely slow."""
        return self._run is not None and self._run.has_failed

    def take(self, timeout_s: float = 0.0) -> Connection | None:
        """The connection, once; None when there is none within `timeout_s`."""
        if self._run is None:
            return None
        connection = self._run.take(timeout_s)
        if connection is not None:
            self._connect_s = self._run.connect_s
            self._run = None
        return connection

    def stop(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


class _Run:
    """From a start to one connection: a thread that begins attempts, and one an attempt."""

    def __init__(
        self, link: VerifierLink, breaker: CircuitBreaker, known_s: float, on_ready: Callable[[], None]
    ) -> None:
        self.last_error: OutriderError | None = None
        self.has_failed = False
        self.connect_s = known_s
        self._link = link
        self._breaker = breaker
        self._on_ready = on_ready
        self._lives_s = (max(_SHORT_S, 2 * known_s), max(_LONG_S, 4 * known_s))
        self._ready: SimpleQueue[Connection] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False  # stopped, or there is a connection
        self._num_under_way = 0
        self._wake = threading.Event()  # the next attempt need not wait for those under way
        threading.Thread(target=self._begin_attempts, name="edge-link-prober", daemon=True).start()

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

    def _begin_attempts(self) -> None:
        for number in itertools.count():
            if number and self._breaker.is_closed:
                self._wake.wait(_PATIENCE_S[min(number, len(_PATIENCE_S)) - 1])
            time.sleep(self._breaker.probe_due_in_s)
            with self._lock:
                if self._is_over:
                    return
                self._num_under_way += 1
                self._wake.clear()
            self._breaker.record_probe_started()
            life_s = self._lives_s[number % _LONG_EVERY == 0]
            threading.Thread(
                target=self._attempt, args=(life_s,), name="edge-link-attempt", daemon=True
            ).start()

    def _attempt(self, life_s: float) -> None:
        start_s = time.monotonic()
        try:
            connection = self._link.connect(life_s)
        except LinkError as error:
            self._note_failure(error)
            return
        except Exception as error:  # a bug: whoever waits for this thread must hear of it
            log.exception("an attempt to connect to %s failed", self._link.address)
            self._note_failure(LinkFaultError(f"cannot connect to {self._link.address}: {error!r}"))
            return
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        self._wake.set()
        if not is_first:
            connection.close()
            return
        self.connect_s = time.monotonic() - start_s
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
