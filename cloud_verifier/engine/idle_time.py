"""Counts the time in which clients could be heard: how long something was idle is measured by it."""

from __future__ import annotations

from outrider.common.clock import Clock

SWEEP_S = 1.0  # between two looks for what is idle


class IdleClock:
    """Counts at most `SWEEP_S` from one look to the next one.

    While the process is stopped (a frozen machine, SIGSTOP), or a step takes long, messages wait in sockets: no client
    is idle for that. Read on any thread; one looks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked = clock.now(), 0.0  # the clock's time at the last look, and what was counted until then

    def now(self) -> float:
        """Returns the seconds that were counted so far."""
        return self._counted_at(self._clock.now())

    def look(self) -> None:
        """Counts what has passed since the last look."""
        now_s = self._clock.now()
        self._looked = now_s, self._counted_at(now_s)

    def _counted_at(self, now_s: float) -> float:
        looked_s, counted_s = self._looked
        return counted_s + min(now_s - looked_s, SWEEP_S)
