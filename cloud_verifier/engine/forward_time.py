"""What a forward takes, by its tokens and by how many others each of them attends to."""

from __future__ import annotations

import numpy as np

_MEMORY = 0.98  # weight that a forward's time keeps with every later one
_MOST = 2.0  # times what was expected: a longer forward, of a process that had to wait, counts as so long
_CLEARLY = 0.9  # of the error: another number of positions has to explain the forwards so much better
# Whether as many positions take as long to attend to as the rest of a token takes; the first: attention is free.
_POSITIONS = (np.inf, *(float(1 << power) for power in range(16, 5, -1)))


class ForwardTime:
    """Fits seconds = base_s + token_s · cost by least squares, for the sum of what all tokens cost.

    A token that attends to `n` others costs 1 + n / P. P is the one of some powers of two that fits best, and
    stays until another one is clearly better. `base_s` and `token_s` are never negative. Forwards of one size
    cannot separate the two: all of their time then counts per token, which overestimates larger ones.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.token_s = 0.0
        self._per_position = 1.0 / np.array(_POSITIONS)
        self._best = 0
        # Weighted sums over all forwards: for each P of x, x² and x·t, where x is the cost; of 1, t and t².
        self._x = np.zeros((3, len(_POSITIONS)))
        self._t = np.zeros(3)

    def token_cost(self, num_attended: float) -> float:
        """Returns what a token costs that attends to so many others, by one that attends to none."""
        return 1.0 + num_attended / _POSITIONS[self._best]

    def seconds(self, cost: float) -> float:
        """Returns what a forward takes whose tokens cost so much; 0 where none was observed."""
        return self.base_s + self.token_s * cost

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Adds a forward. `num_attended` is summed over its tokens."""
        if expected_s := self.seconds(num_tokens + num_attended / _POSITIONS[self._best]):
            seconds = min(seconds, _MOST * expected_s)
        x = num_tokens + num_attended * self._per_position
        self._x = _MEMORY * self._x + (x, x * x, x * seconds)
        self._t = _MEMORY * self._t + (1.0, seconds, seconds * seconds)
        weight, sum_t, sum_tt = self._t
        mean_x, mean_xx, mean_xt = self._x / weight
        mean_t = sum_t / weight
        variance = mean_xx - mean_x * mean_x
        slope = mean_t / mean_x
        is_sloped = mean_xx > 1.01 * mean_x * mean_x
        fitted = (mean_xt - mean_x * mean_t) / np.where(is_sloped, variance, 1.0)
        slope = np.where(is_sloped, np.clip(fitted, 0.0, slope), slope)
        base = mean_t - slope * mean_x
        error = (
            sum_tt / weight
            - 2 * (base * mean_t + slope * mean_xt)
            + base * base
            + 2 * base * slope * mean_x
            + slope * slope * mean_xx
        )
        if (better := int(np.argmin(error))) != self._best and error[better] < _CLEARLY * error[self._best]:
            self._best = better
        self.base_s, self.token_s = float(base[self._best]), float(slope[self._best])
