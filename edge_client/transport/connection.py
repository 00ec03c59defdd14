"""The one connection a session has, and how it comes by the next one: breaker, probes, cancelling."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from outrider.common.errors import LinkError, LinkFaultError, RoundTimeoutError
from outrider.common.types import SessionRequest, SessionResponse
from outrider.edge_client.transport.breaker import CircuitBreaker
from outrider.edge_client.transport.link.base import Connection, Traffic, VerifierLink
from outrider.edge_client.transport.reconnect import Prober

log = logging.getLogger(__name__)

_SLICE_S = 0.05  # of waits that a cancel or a probe must be able to end
_CONNECT_S = 5.0  # a first connection that nobody is patient with has so long, and who is patient is told


class CancelledByUser(Exception):
    """`cancel` was called: unwinds to the session, never to a caller."""


class Lifeline:
    """Holds a connection, or looks for one. Used by one thread; `cancel` may come from any."""

    def __init__(self, link: VerifierLink, clock: Callable[[], float] = time.monotonic) -> None:
        self.breaker = CircuitBreaker(clock)
        self.num_reconnects = 0
        self._link = link
        self._clock = clock
        self._prober = Prober(link, self.breaker, self._wake)
        self._connection: Connection | None = None
        self._is_cancelled = False
        self._last_answer_s = clock()

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def traffic(self) -> Traffic:
        return self._link.traffic

    @property
    def connection(self) -> Connection | None:
        return self._connection

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def silent_for_s(self) -> float:
        """Seconds since the verifier last said anything."""
        return self._clock() - self._last_answer_s

    @property
    def trouble(self) -> str:
        """Why there is no connection, in brackets, or nothing."""
        error = self._prober.last_error
        return f" ({error})" if self._connection is None and error else ""

    # -------------------------------------------------------------------------------- connecting

    def connect(self, patience_s: float, at_most_s: float = math.inf) -> None:
        """The first connection. Raises `LinkError` when every attempt under way has failed, or some have for
        5 s, after `patience_s` or later; at once for a fault that no patience mends. After `at_most_s` it
        raises too, and goes on trying."""
        start_s, told_after_s = self._clock(), _CONNECT_S
        self._prober.start()
        while self._connection is None:
            self.check_cancelled()
            self._connection = self._prober.take(_SLICE_S)
            if self._connection is None:
                waited_s = self._clock() - start_s
                self._check_hope(waited_s, patience_s, at_most_s)
                if told_after_s <= waited_s < patience_s:
                    told_after_s = math.inf
                    where, left_s = f"{self.address} yet{self.trouble}", patience_s - waited_s
                    log.warning("no connection to %s; trying for %.0f s more", where, left_s)

    def _check_hope(self, waited_s: float, patience_s: float, at_most_s: float) -> None:
        error = self._prober.last_error
        if error is not None:
            has_failed = self._prober.has_failed or waited_s >= patience_s + _CONNECT_S
            if isinstance(error, LinkFaultError) or (has_failed and waited_s >= patience_s):
                self._prober.stop()
                raise error
        if waited_s >= at_most_s:
            raise LinkError(f"no connection to {self.address} in {waited_s:.1f} s")

    def wait(self, give_up_s: float) -> Connection:
        """The connection, once there is one. Raises `RoundTimeoutError` when there is none by `give_up_s`."""
        while self._connection is None:
            self.check_cancelled()
            self._prober.start()
            if not self._adopt_probe(_SLICE_S) and self._clock() >= give_up_s:
                raise RoundTimeoutError(f"no connection to {self.address}{self.trouble}")
        return self._connection

    def drop(self) -> None:
        """The connection is lost or suspect: a fresh one from now on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.suspect()

    def suspect(self) -> None:
        """A round timed out: keep the connection (a late answer may come), and probe a fresh one."""
        self.breaker.record_failure()
        self._prober.start()

    def take_sign_of_life(self) -> tuple[bool, SessionResponse | None]:
        """Whether the link seems to work again (a probe connected, or an answer came), and that answer."""
        self.check_cancelled()
        if self._adopt_probe():
            return True, None
        if self._connection is None:
            self._prober.start()
            return False, None
        try:
            reply = self._connection.receive(0.0)
        except LinkError:
            self.drop()
            return False, None
        if reply is not None:
            self._note_answer()
        return reply is not None, reply

    def _wake(self) -> None:
        """A fresh connection is there: whoever listens to the old one should know."""
        if (connection := self._connection) is not None:
            connection.wake()

    def _adopt_probe(self, timeout_s: float = 0.0) -> bool:
        connection = self._prober.take(timeout_s)
        if connection is None:
            return False
        if self._connection is not None:
            self._connection.close()
        self._connection = connection
        self.num_reconnects += 1
        self.breaker.record_probe_connected()
        return True

    # ---------------------------------------------------------------------------------- messages

    def send(self, request: SessionRequest) -> None:
        """Sends if there is a connection to send on. Raises `LinkError`."""
        if self._connection is not None:
            self._connection.send(request)

    def receive(self, until_s: float) -> SessionResponse | None:
        """A message, or None at `until_s` or a little earlier. Raises `LinkError`.

        While the breaker is not closed a probe that connects replaces the connection meanwhile.
        """
        assert self._connection is not None, "receive without a connection"
        timeout_s = until_s - self._clock()
        if not self.breaker.is_closed:
            timeout_s = min(_SLICE_S, timeout_s)
        reply = self._connection.receive(timeout_s)
        if reply is not None:
            self._note_answer()
        elif not self.breaker.is_closed:
            self._adopt_probe()
        return reply

    @property
    def arrival_s(self) -> float:
        """When the message that was last received came, by the clock: at times before anybody looked."""
        lay_here_s = self._connection.lay_here_s if self._connection is not None else 0.0
        return self._clock() - lay_here_s

    def start_trip(self) -> None:
        """Times a trip beside what is under way, where the connection can."""
        if self._connection is not None:
            self._connection.start_trip()

    def take_trip(self) -> float | None:
        """What the last one took, in seconds, once."""
        return self._connection.take_trip() if self._connection is not None else None

    def _note_answer(self) -> None:
        self._last_answer_s = self._clock()
        if not self.breaker.is_closed:
            self.breaker.record_answer()
            self._prober.stop()

    # -------------------------------------------------------------------------------- cancelling

    def cancel(self) -> None:
        """Ends any wait. Safe in a signal handler."""
        self._is_cancelled = True
        self._wake()

    def check_cancelled(self) -> None:
        if self._is_cancelled:
            raise CancelledByUser

    def sleep(self, seconds: float) -> None:
        end_s = self._clock() + seconds
        while (left_s := end_s - self._clock()) > 0:
            self.check_cancelled()
            time.sleep(min(_SLICE_S, left_s))

    def detach(self) -> Connection | None:
        """Gives the connection away for closing, and stops looking for others."""
        self._prober.stop()
        connection, self._connection = self._connection, None
        return connection
