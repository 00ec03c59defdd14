"""How long a step takes by the number of its tokens, fitted to recent steps."""

from __future__ import annotations

_MEMORY = 0.98  # weight that a step's time keeps with every later step


class StepTimes:
    """Fits a step's time as `base_s` + `token_s` per token, in seconds.

    Steps of one size cannot separate the two: all of it then counts per token, which overestimates larger
    steps until one is seen.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.token_s = 0.0
        self._sums = [0.0] * 5  # of weights, n, t, n², n·t

    @property
    def is_known(self) -> bool:
        """Returns whether a step has been measured."""
        return self._sums[0] > 0

    @property
    def is_sloped(self) -> bool:
        """Returns whether sizes differed by enough to separate the base from the time per token."""
        weight, sum_n, _, sum_nn, _ = self._sums
        return self.is_known and sum_nn * weight > 1.01 * sum_n * sum_n

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Adds a step of `num_tokens` that took `step_s`."""
        n, t = float(num_tokens), step_s
        new = (1.0, n, t, n * n, n * t)
        self._sums = [_MEMORY * old + x for old, x in zip(self._sums, new, strict=True)]
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums
        mean_n, mean_t = sum_n / weight, sum_t / weight
        self.token_s = mean_t / mean_n
        if self.is_sloped:
            variance = sum_nn / weight - mean_n * mean_n
            slope = (sum_nt / weight - mean_n * mean_t) / variance
            self.token_s = min(max(slope, 0.0), self.token_s)
        self.base_s = mean_t - self.token_s * mean_n
