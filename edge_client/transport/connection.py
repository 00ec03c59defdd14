"""The one connection of a session and its replacement: breaker, reconnection, cancelling."""

from __future__ import annotations

import logging
import math

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import LinkError, LinkFaultError, OutriderError, RoundTimeoutError
from outrider.common.types import SessionRequest, SessionResponse
from outrider.edge_client.transport.breaker import CircuitBreaker
from outrider.edge_client.transport.link.base import Connection, Traffic, VerifierLink
from outrider.edge_client.transport.reconnect import Reconnector
from outrider.edge_client.transport.threads import SYSTEM_THREADS, Threads

log = logging.getLogger(__name__)

_SLICE_S = 0.05  # the longest wait in one piece: a cancel or a fresh connection must be able to end it
_CONNECT_S = 5.0  # the time that a first connection has without patience; with patience, a warning follows it


class CancelledByUser(Exception):
    """Unwinds to the session after `cancel` was called; never reaches a caller."""


class ConnectionManager:
    """Holds a connection, or looks for one. Used by one thread; `cancel` may come from any."""

    def __init__(
        self, link: VerifierLink, clock: Clock = SYSTEM_CLOCK, threads: Threads = SYSTEM_THREADS
    ) -> None:
        self.breaker = CircuitBreaker(clock)
        self.connection: Connection | None = None
        self.num_reconnects = 0
        self._link = link
        self._clock = clock
        self._reconnector = Reconnector(link, self.breaker, self._wake, clock, threads)
        self._is_cancelled = False
        self._broken_by: LinkError | None = None  # since the last answer
        self._last_answer_s = clock.now()

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def traffic(self) -> Traffic:
        return self._link.traffic

    @property
    def silent_for_s(self) -> float:
        """Returns the seconds since the verifier's last message."""
        return self._clock.now() - self._last_answer_s

    @property
    def trouble(self) -> str:
        """Returns in brackets why there is no connection, or why the last one without an answer broke; empty where no
        reason is known."""
        error: OutriderError | None = self._broken_by
        if self.connection is None:
            error = self._reconnector.last_error or error
        return f" ({error})" if error else ""

    # -------------------------------------------------------------------------------- connecting

    def connect(self, patience_s: float, at_most_s: float = math.inf) -> None:
        """Makes the first connection. Raises `LinkError` when every attempt under way has failed, or some
        have for 5 s, after `patience_s` or later; at once for a fault that waiting does not repair. Raises it
        after `at_most_s` too, and keeps trying."""
        start_s, warn_after_s = self._clock.now(), _CONNECT_S
        self._reconnector.start()
        while self.connection is None:
            self.check_cancelled()
            self.connection = self._reconnector.take(_SLICE_S)
            if self.connection is None:
                waited_s = self._clock.now() - start_s
                self._check_attempts(waited_s, patience_s, at_most_s)
                if warn_after_s <= waited_s < patience_s:
                    warn_after_s = math.inf
                    where, left_s = f"{self.address} yet{self.trouble}", patience_s - waited_s
                    log.warning("no connection to %s; trying for %.0f s more", where, left_s)

    def _check_attempts(self, waited_s: float, patience_s: float, at_most_s: float) -> None:
        error = self._reconnector.last_error
        if error is not None:
            has_failed = self._reconnector.has_failed or waited_s >= patience_s + _CONNECT_S
            if isinstance(error, LinkFaultError) or (has_failed and waited_s >= patience_s):
                self._reconnector.stop()
                raise error
        if waited_s >= at_most_s:
            raise LinkError(f"no connection to {self.address} in {waited_s:.1f} s")

    def wait(self, give_up_s: float) -> Connection:
        """Returns the connection once there is one. Raises `RoundTimeoutError` at `give_up_s`."""
        while self.connection is None:
            self.check_cancelled()
            self._reconnector.start()
            if not self._adopt(_SLICE_S) and self._clock.now() >= give_up_s:
                raise RoundTimeoutError(f"no connection to {self.address}{self.trouble}")
        return self.connection

    def drop(self) -> None:
        """Closes the connection and starts to look for another."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.mark_suspect()

    def mark_suspect(self) -> None:
        """Looks for a fresh connection after a timeout, and keeps this one: a late answer may arrive on it."""
        self.breaker.record_failure()
        self._reconnector.start()

    def poll_recovery(self) -> tuple[bool, SessionResponse | None]:
        """Returns whether the link seems to work again (a fresh connection is there, or a message came), and
        that message."""
        self.check_cancelled()
        if self._adopt():
            return True, None
        if self.connection is None:
            self._reconnector.start()
            return False, None
        try:
            reply = self.connection.receive(0.0)
        except LinkError:
            self.drop()
            return False, None
        if reply is not None:
            self._note_answer()
        return reply is not None, reply

    def _wake(self) -> None:
        """Ends a wait on the old connection: a fresh one is there, or the user cancelled."""
        if (connection := self.connection) is not None:
            connection.wake()

    def _adopt(self, timeout_s: float = 0.0) -> bool:
        connection = self._reconnector.take(timeout_s)
        if connection is None:
            return False
        if self.connection is not None:
            self.connection.close()
        self.connection = connection
        self.num_reconnects += 1
        self.breaker.record_connected()
        return True

    # ---------------------------------------------------------------------------------- messages

    def send(self, request: SessionRequest) -> None:
        """Sends where there is a connection. Raises `LinkError`."""
        if self.connection is not None:
            self.connection.send(request)

    def receive(self, until_s: float) -> SessionResponse | None:
        """Returns a message, or None at `until_s` or a little earlier. Raises `LinkError`.

        While the breaker is not closed, a fresh connection replaces this one meanwhile.
        """
        assert self.connection is not None, "receive without a connection"
        timeout_s = until_s - self._clock.now()
        if not self.breaker.is_closed:
            timeout_s = min(_SLICE_S, timeout_s)
        try:
            reply = self.connection.receive(timeout_s)
        except LinkError as error:
            self._broken_by = error
            raise
        if reply is not None:
            self._note_answer()
        elif not self.breaker.is_closed:
            self._adopt()
        return reply

    @property
    def arrival_s(self) -> float:
        """Returns the clock's time at which the message last received arrived, before it was read perhaps."""
        queued_s = self.connection.queued_s if self.connection is not None else 0.0
        return self._clock.now() - queued_s

    def _note_answer(self) -> None:
        self._last_answer_s, self._broken_by = self._clock.now(), None
        if not self.breaker.is_closed:
            self.breaker.record_answer()
            self._reconnector.stop()

    # -------------------------------------------------------------------------------- cancelling

    def cancel(self) -> None:
        """Ends any wait. Safe in a signal handler."""
        self._is_cancelled = True
        self._wake()

    def check_cancelled(self) -> None:
        """Raises `CancelledByUser` after `cancel`."""
        if self._is_cancelled:
            raise CancelledByUser

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises `CancelledByUser` where `cancel` is called meanwhile."""
        end_s = self._clock.now() + seconds
        while (left_s := end_s - self._clock.now()) > 0:
            self.check_cancelled()
            self._clock.sleep(min(_SLICE_S, left_s))

    def detach(self) -> Connection | None:
        """Hands over the connection for closing, and stops looking for others."""
        self._reconnector.stop()
        connection, self.connection = self.connection, None
        return connection
