"""The circuit breaker of the link. It decides only; `outrider.edge_client.transport.reconnect` connects."""

from __future__ import annotations

import enum

from outrider.common.clock import Clock

ATTEMPT_INTERVAL_S = 0.2  # the longest time between the starts of two attempts to reconnect
_PACE_S = 0.18  # the planned one: on a busy machine threads wake up to 10 ms late, twice an attempt


class BreakerState(enum.StrEnum):
    """The state of the link."""

    CLOSED = "closed"  # rounds are sent
    OPEN = "open"  # the last round failed; fresh connections are attempted
    HALF_OPEN = "half_open"  # an attempt connected; the next round decides


class CircuitBreaker:
    """CLOSED → (failure) → OPEN → (an attempt connects) → HALF_OPEN → (answer) → CLOSED, or back to OPEN."""

    def __init__(self, clock: Clock, attempt_interval_s: float = _PACE_S) -> None:
        self._clock = clock
        self._attempt_interval_s = attempt_interval_s
        self._last_attempt_s = float("-inf")
        self.state = BreakerState.CLOSED
        self.num_opened = 0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def record_failure(self) -> None:
        """Opens after a round timed out or the connection broke."""
        if self.state is BreakerState.CLOSED:
            self.num_opened += 1
        self.state = BreakerState.OPEN

    def record_answer(self) -> None:
        """Closes: the verifier answered something, so the link works."""
        self.state = BreakerState.CLOSED

    def record_connected(self) -> None:
        """Half-opens where it was open: an attempt connected."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def record_attempt(self) -> None:
        """Starts the interval to the next attempt."""
        self._last_attempt_s = self._clock.now()

    @property
    def attempt_due_in_s(self) -> float:
        """Returns the seconds until the next attempt may start, 0 when it is due."""
        return max(0.0, self._last_attempt_s + self._attempt_interval_s - self._clock.now())
