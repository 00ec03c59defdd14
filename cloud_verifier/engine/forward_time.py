"""Estimates a forward's time from its tokens and the positions they attend to."""

from __future__ import annotations

import math

from outrider.common.step_time import LeastSquaresTime

_MEMORY = 0.98  # weight that a forward's time keeps with every later one
_MOST = 2.0  # times what was expected: a longer forward, of a process that had to wait, counts as so long
_CLEARLY = 0.9  # of the error: another number of positions has to explain the forwards so much better
# Whether as many positions take as long to attend to as the rest of a token takes; the first: attention is free.
_POSITIONS = (math.inf, *(float(1 << power) for power in range(16, 5, -1)))


class ForwardTime:
    """Fits seconds as a line over what all tokens cost (`LeastSquaresTime`).

    A token that attends to `n` others costs 1 + n / P. P is the one of some powers of two that fits best, and
    stays until another one is clearly better.
    """

    def __init__(self) -> None:
        self._fits = {positions: LeastSquaresTime(_MEMORY) for positions in _POSITIONS}
        self._positions = _POSITIONS[0]  # the best P

    def token_cost(self, num_attended: float) -> float:
        """Returns what a token costs that attends to so many others, by one that attends to none."""
        return 1.0 + num_attended / self._positions

    def seconds(self, cost: float) -> float:
        """Returns what a forward takes whose tokens cost so much; 0 where none was observed."""
        fit = self._fits[self._positions]
        return fit.base_s + fit.token_s * cost

    def expected_s(self, num_tokens: int, num_attended: int) -> float:
        """Returns what a forward takes; 0 where none was observed. `num_attended` is summed over its tokens."""
        return self.seconds(num_tokens + num_attended / self._positions)

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Adds a forward."""
        if expected_s := self.expected_s(num_tokens, num_attended):
            seconds = min(seconds, _MOST * expected_s)
        for positions, fit in self._fits.items():
            fit.observe(num_tokens + num_attended / positions, seconds)
        errors = {positions: fit.mean_squared_error for positions, fit in self._fits.items()}
        best = min(errors, key=errors.__getitem__)
        if errors[best] < _CLEARLY * errors[self._positions]:
            self._positions = best
