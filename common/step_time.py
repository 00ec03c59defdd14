"""A forward's time as a line over its tokens: base_s + token_s * num_tokens. Two fits with one interface, and one with
a part for each session.

`LeastSquaresTime` costs a few additions a step and is exact on clean data: the verifier refits it after every
step, and a plan fits means over hundreds of rounds with it. `MedianSlopeTime` looks at few rounds, of which a
stalled packet or a slow step may be one: it moves a mean, and would shorten drafts for many rounds, while a
median of slopes is not changed. `SharedStepTime` tells what a session adds to a step beside its tokens: its answer.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

# By hand.
_RIDGE = 0.01  # of the squared mean of tokens
_LEAST_VARIANCE = 0.0001  # of the squared mean of sessions: where all steps have as many


class LeastSquaresTime:
    """Fits by least squares. Each later forward multiplies an observation's weight by `memory`.

    `base_s` and `token_s` are never negative. Forwards of one size cannot separate the two: all of their time
    then counts per token, which overestimates larger ones until one is observed.
    """

    def __init__(self, memory: float = 1.0) -> None:
        self.base_s = 0.0
        self.token_s = 0.0
        self._memory = memory
        self._sums = [0.0] * 6  # of weights, n, t, n², n·t, t²

    @property
    def is_known(self) -> bool:
        """Returns whether any forward was observed."""
        return self._sums[0] > 0

    @property
    def is_sloped(self) -> bool:
        """Returns whether the numbers of tokens differed by enough to separate base and slope."""
        weight, sum_n, _, sum_nn, _, _ = self._sums
        return _differ(weight, sum_n, sum_nn)

    @property
    def through_origin_s(self) -> float:
        """Returns seconds a token of the best line without a base."""
        return self._sums[4] / self._sums[3]

    @property
    def mean_squared_error(self) -> float:
        """Returns the weighted mean of the squares of what the line is off by, in s²."""
        weight, sum_n, sum_t, sum_nn, sum_nt, sum_tt = self._sums
        base, slope = self.base_s, self.token_s
        squares = sum_tt + base * base * weight + slope * slope * sum_nn
        return (squares + 2 * (base * slope * sum_n - base * sum_t - slope * sum_nt)) / weight

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Adds a forward; the first one has at least one token."""
        n, t = float(num_tokens), seconds
        new = (1.0, n, t, n * n, n * t, t * t)
        self._sums = [self._memory * old + x for old, x in zip(self._sums, new, strict=True)]
        weight, sum_n, sum_t, sum_nn, sum_nt, _ = self._sums
        mean_n, mean_t = sum_n / weight, sum_t / weight
        self.token_s = mean_t / mean_n
        if self.is_sloped:
            variance = sum_nn / weight - mean_n * mean_n
            slope = (sum_nt / weight - mean_n * mean_t) / variance
            self.token_s = min(max(slope, 0.0), self.token_s)
        self.base_s = mean_t - self.token_s * mean_n


class SharedStepTime:
    """Fits fixed_s + session_s * num_sessions + token_s * num_tokens by least squares, none of them negative. Each
    later step multiplies an observation's weight by `memory`.

    Where every step has as many tokens of each session, as streams have, nothing separates the two: ridge regression
    (Hoerl and Kennard 1970) then draws a token's part to the slope of forwards over their tokens.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sums = [0.0] * 9  # of weights, s, n, t, s², s·n, n², s·t, n·t
        self._forwards = LeastSquaresTime(memory)
        self._parts: tuple[float, float, float] | None = None

    def observe(self, num_sessions: int, num_tokens: int, seconds: float, forward_s: float) -> None:
        """Adds a step, of which its forward took `forward_s`."""
        self._forwards.observe(num_tokens, forward_s)
        s, n, t = float(num_sessions), float(num_tokens), seconds
        new = (1.0, s, n, t, s * s, s * n, n * n, s * t, n * t)
        self._sums = [self._memory * old + x for old, x in zip(self._sums, new, strict=True)]
        self._parts = None

    @property
    def is_sloped(self) -> bool:
        """Returns whether the numbers of tokens differed by enough to separate fixed time and slope."""
        return self._forwards.is_sloped

    @property
    def parts(self) -> tuple[float, float, float]:
        """Returns (fixed_s, session_s, token_s), where `is_sloped`."""
        if self._parts is None:
            self._parts = self._fit()
        return self._parts

    def _fit(self) -> tuple[float, float, float]:
        weight, *sums = self._sums
        s, n, t, ss, sn, nn, st, nt = (each / weight for each in sums)
        ridge = _RIDGE * n * n
        ss, sn, nn = ss - s * s + _LEAST_VARIANCE * s * s, sn - s * n, nn - n * n + ridge
        st, nt = st - s * t, nt - n * t + ridge * self._forwards.token_s
        determinant = ss * nn - sn * sn
        session_s, token_s = (nn * st - sn * nt) / determinant, (ss * nt - sn * st) / determinant
        if session_s < 0.0:
            session_s, token_s = 0.0, max(0.0, nt / nn)
        elif token_s < 0.0:
            session_s, token_s = max(0.0, st / ss), 0.0
        sloped_s = session_s * s + token_s * n
        share = max(0.0, min(1.0, t / sloped_s)) if sloped_s else 1.0
        return max(0.0, t - sloped_s), share * session_s, share * token_s


class MedianSlopeTime:
    """Fits recent forwards by the median slope between all pairs of them (Theil 1950, Sen 1968), each pair
    weighted by what its numbers of tokens differ by, beside a prior slope."""

    def __init__(self, num_samples: int, prior_share: float, prior_weight_tokens: float) -> None:
        """`prior_share` of a forward's time is taken to grow with its tokens, with the weight of a pair whose
        sizes differ by `prior_weight_tokens`."""
        self._samples: deque[tuple[int, float]] = deque(maxlen=num_samples)  # tokens, seconds
        # Of all pairs, with weights; None: a forward was added.
        self._slopes: list[tuple[float, float]] | None = None
        self._prior_share, self._prior_weight = prior_share, prior_weight_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Adds a forward."""
        self._samples.append((num_tokens, seconds))
        self._slopes = None

    @property
    def has_any(self) -> bool:
        """Returns whether any forward was observed."""
        return bool(self._samples)

    @property
    def mean_tokens(self) -> float:
        """Returns the mean number of tokens of recent forwards."""
        return statistics.fmean(n for n, _ in self._samples)

    @property
    def median_s(self) -> float:
        """Returns the median time of recent forwards."""
        return statistics.median(t for _, t in self._samples)

    @property
    def is_sloped(self) -> bool:
        """Returns whether the numbers of tokens differed by enough to separate base and slope."""
        pairs = combinations((n for n, _ in self._samples), 2)
        return sum(abs(n - other_n) for n, other_n in pairs) >= self._prior_weight

    def line(
        self, stated_token_s: float | None = None, weight_tokens: float | None = None
    ) -> tuple[float, float]:
        """Returns (base_s, token_s), neither negative, after at least one observation.

        `stated_token_s` is the slope that the verifier states; it takes the place of the prior slope, with another
        weight where `weight_tokens` says one.
        """
        if stated_token_s is None:
            prior = self._prior_share * self.median_s / self.mean_tokens, self._prior_weight
        else:
            prior = stated_token_s, self._prior_weight if weight_tokens is None else weight_tokens
        if self._slopes is None:
            self._slopes = sorted(
                ((t - other_t) / (n - other_n), float(abs(n - other_n)))
                for (n, t), (other_n, other_t) in combinations(self._samples, 2)
                if n != other_n
            )
        token_s = max(0.0, _weighted_median([*self._slopes, prior]))
        base_s = statistics.median(t - token_s * n for n, t in self._samples)
        return max(0.0, base_s), token_s

    def line_of_slope(self, token_s: float) -> tuple[float, float]:
        """Returns (base_s, token_s) for a known slope, at most that of the line through the origin."""
        token_s = min(token_s, statistics.median(t / n for n, t in self._samples))
        return max(0.0, statistics.median(t - token_s * n for n, t in self._samples)), token_s


def _differ(weight: float, sum_n: float, sum_nn: float) -> bool:
    """Returns whether numbers with these weighted sums, of themselves and of their squares, differ noticeably."""
    return weight > 0 and sum_nn * weight > 1.01 * sum_n * sum_n


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Returns the first value of (value, weight) pairs up to which half of all weight lies."""
    values.sort()
    left = sum(weight for _, weight in values) / 2
    for value, weight in values:
        left -= weight
        if left <= 0:
            return value
    return values[-1][0]
