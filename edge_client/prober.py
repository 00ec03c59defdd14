"""Fresh connections in the background, while the edge goes on drafting or waits."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from queue import Empty, SimpleQueue

from common.errors import LinkError, LinkFaultError, OutriderError
from edge_client.breaker import CircuitBreaker
from edge_client.link.base import Connection, VerifierLink

log = logging.getLogger(__name__)

# A lost SYN is sent again by TCP only after 1 s, 3 s …, so a short attempt sees a link that came back
# sooner; the long one is for links whose round trip takes that long.
_ATTEMPT_S = (0.5, 1.0, 4.0)


class Prober:
    """Tries to connect until it has a connection; `breaker` paces the attempts (every 200 ms)."""

    def __init__(self, link: VerifierLink, breaker: CircuitBreaker) -> None:
        self._link = link
        self._breaker = breaker
        self._run: _Run | None = None

    def start(self) -> None:
        """Begins to try, unless it already does or holds a connection nobody took."""
        if self._run is None:
            self._run = _Run(self._link, self._breaker)

    @property
    def last_error(self) -> OutriderError | None:
        return self._run.last_error if self._run else None

    def take(self, timeout_s: float = 0.0) -> Connection | None:
        """The connection, once; None when there is none within `timeout_s`."""
        if self._run is None:
            return None
        connection = self._run.take(timeout_s)
        if connection is not None:
            self._run = None
        return connection

    def stop(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


class _Run:
    """One thread from start to one connection."""

    def __init__(self, link: VerifierLink, breaker: CircuitBreaker) -> None:
        self.last_error: OutriderError | None = None
        self._ready: SimpleQueue[Connection] = SimpleQueue()
        self._is_stopped = False
        self._lock = threading.Lock()
        thread = threading.Thread(
            target=self._try, args=(link, breaker), name="edge-link-prober", daemon=True
        )
        thread.start()

    def take(self, timeout_s: float) -> Connection | None:
        try:
            return self._ready.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        if (connection := self.take(0.0)) is not None:
            connection.close()

    def _try(self, link: VerifierLink, breaker: CircuitBreaker) -> None:
        for attempt_s in itertools.cycle(_ATTEMPT_S):
            time.sleep(breaker.probe_due_in_s)
            if self._is_stopped:
                return
            breaker.record_probe_started()
            try:
                connection = link.connect(attempt_s)
            except LinkError as error:
                self.last_error = error
                continue
            except Exception as error:  # a bug: whoever waits for this thread must hear of it
                log.exception("an attempt to connect to %s failed", link.address)
                self.last_error = LinkFaultError(f"cannot connect to {link.address}: {error!r}")
                continue
            with self._lock:
                if self._is_stopped:
                    connection.close()
                else:
                    self._ready.put(connection)
            return
