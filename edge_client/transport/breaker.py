"""The circuit breaker of the link. Pure: it only decides; `outrider.edge_client.transport.reconnect` connects."""

from __future__ import annotations

import enum
from collections.abc import Callable

PROBE_INTERVAL_S = 0.2  # an attempt to connect begins at least as often ...
_PACE_S = 0.18  # ... though threads wake and start late, on a busy machine by 10 ms


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # rounds flow
    OPEN = "open"  # the last round failed; probe on fresh connections
    HALF_OPEN = "half_open"  # a probe connected; the next round decides


class CircuitBreaker:
    """CLOSED → (failure) → OPEN → (a probe connects) → HALF_OPEN → (answer) → CLOSED, or back to OPEN."""

    def __init__(self, clock: Callable[[], float], probe_interval_s: float = _PACE_S) -> None:
        self._clock = clock
        self._probe_interval_s = probe_interval_s
        self._last_probe_s = float("-inf")
        self.state = BreakerState.CLOSED
        self.num_opened = 0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def record_failure(self) -> None:
        """A round timed out, or the connection broke."""
        if self.state is BreakerState.CLOSED:
            self.num_opened += 1
        self.state = BreakerState.OPEN

    def record_answer(self) -> None:
        """The verifier answered something: the link works."""
        self.state = BreakerState.CLOSED

    def record_probe_connected(self) -> None:
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def record_probe_started(self) -> None:
        self._last_probe_s = self._clock()

    @property
    def probe_due_in_s(self) -> float:
        """Seconds until the next probe may start; 0 when it is due. Probes are for an open breaker."""
        return max(0.0, self._last_probe_s + self._probe_interval_s - self._clock())
