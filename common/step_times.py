"""A forward's time as base + per token, fitted to those before. Pure."""

from __future__ import annotations


class StepTimes:
    """Forwards of one size cannot tell base and tokens apart: `token_share` of their time then counts per
    token. 1, the careful choice, overestimates larger forwards until one is seen.

    `memory` is the weight a forward's time keeps with every later one.
    """

    def __init__(self, token_share: float = 1.0, memory: float = 0.98) -> None:
        self.base_s = 0.0
        self.token_s = 0.0
        self._token_share = token_share
        self._memory = memory
        self._sums = [0.0] * 5  # of weights, n, t, n², n·t

    @property
    def is_known(self) -> bool:
        return self._sums[0] > 0

    def observe(self, num_tokens: int, step_s: float) -> None:
        n, t = float(num_tokens), step_s
        new = (1.0, n, t, n * n, n * t)
        self._sums = [self._memory * old + x for old, x in zip(self._sums, new, strict=True)]
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums
        mean_n, mean_t = sum_n / weight, sum_t / weight
        variance = sum_nn / weight - mean_n * mean_n
        self.token_s = self._token_share * mean_t / mean_n
        if variance > 0.01 * mean_n * mean_n:
            slope = (sum_nt / weight - mean_n * mean_t) / variance
            self.token_s = min(max(slope, 0.0), mean_t / mean_n)
        self.base_s = mean_t - self.token_s * mean_n
