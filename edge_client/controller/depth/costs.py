"""What rounds cost lately, in the terms of the cost model. Pure.

Medians rather than means: a verifier's first forwards, a slow step or a stalled packet say nothing of the
next round, and one of them in a mean would shorten drafts for many.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.core.stats import RoundRecord

_NUM_TRIPS = 7  # a step of the link is believed once it is most of the last trips
_NUM_VERIFICATIONS = 15
_TOKEN_SHARE = (
    0.3  # of a verification that counts per token, until lengths differed: most of a forward is fixed
)
_SHARE_WEIGHT = 12.0  # belief in that, as so many tokens' difference in length
_TOKEN_GUESS = 0.03  # the same, of a target that was seen and verifications that were not
_DRAFT_MEMORY = 0.95  # weight that a round's drafting keeps with every later one
_MIN_RTT_S = 1e-6


class VerifyTimes:
    """A verification as base + per token: the line whose slope is the median of those between all pairs of
    recent rounds (Theil 1950, Sen 1968), a pair weighing what its lengths differ by."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_NUM_VERIFICATIONS)  # tokens, seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._rounds.append((num_tokens, seconds))

    @property
    def middle_s(self) -> float:
        return statistics.median(t for _, t in self._rounds)

    @property
    def is_sloped(self) -> bool:
        """Whether lengths differed by enough to tell a slope."""
        pairs = combinations((n for n, _ in self._rounds), 2)
        return sum(abs(n - other_n) for n, other_n in pairs) >= _SHARE_WEIGHT

    def line(self, told_token_s: float | None = None) -> tuple[float, float]:
        """Seconds for no token, and for each one; none is negative. At least one round was observed.
        `told_token_s`: the verifier's word for the second, believed as much as a guess would be."""
        mean_tokens = statistics.fmean(n for n, _ in self._rounds)
        middle_s = statistics.median(t for _, t in self._rounds)
        guess_s = _TOKEN_SHARE * middle_s / mean_tokens if told_token_s is None else told_token_s
        slopes = [(guess_s, _SHARE_WEIGHT)]
        for (n, t), (other_n, other_t) in combinations(self._rounds, 2):
            if n != other_n:
                slopes.append(((t - other_t) / (n - other_n), abs(n - other_n)))
        token_s = max(0.0, _weighted_median(slopes))
        base_s = statistics.median(t - token_s * n for n, t in self._rounds)
        return max(0.0, base_s), token_s


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Of (value, weight): the first value that half of all weight is not above."""
    values.sort()
    left = sum(weight for _, weight in values) / 2
    for value, weight in values:
        left -= weight
        if left <= 0:
            return value
    return values[-1][0]


class RoundCosts:
    """The draft's time is per token, the verifier's a line over the tokens it feeds (the draft's and one
    more) with its queue in it, and the link's the median of the last trips.

    The link's rates are not told apart from its delay: the longest draft is some 800 bytes, which take less
    than what trips differ by on all but links of well under a megabit a second.
    """

    def __init__(self) -> None:
        self._verify = VerifyTimes()
        self._trips_s: deque[float] = deque(maxlen=_NUM_TRIPS)
        self._targets_s: deque[float] = deque(maxlen=_NUM_VERIFICATIONS)
        self._opening_s: float | None = None
        self._told: tuple[float, float] | None = None  # the verifier's word for its line
        self._num_rounds = 0
        self._draft_s = 0.0
        self._num_drafted = 0.0
        self._estimate: tuple[ModelCosts, LinkCosts] | None = None  # until something is observed

    @property
    def is_known(self) -> bool:
        has_verifier = self._num_rounds or self._targets_s or self._opening_s is not None
        return self._num_drafted > 0 and bool(self._trips_s) and bool(has_verifier)

    def observe(self, record: RoundRecord) -> None:
        """An answered round. A co-located one has no `net_ms`, and its forward for the verifier's time. One
        that was sent ahead waited for our own, which is no part of what it took."""
        self.observe_draft(record.draft_ms / 1e3, record.num_draft_tokens + record.num_dropped_tokens)
        verify_ms = record.verifier_ms or record.forward_ms
        if record.pipelined_hit:
            verify_ms = max(record.forward_ms, verify_ms - record.queue_ms)
        self._verify.observe(record.num_draft_tokens + 1, verify_ms / 1e3)
        self._num_rounds += 1
        self.observe_trip(record.net_ms / 1e3)

    def observe_draft(self, seconds: float, num_tokens: int) -> None:
        self._estimate = None
        self._draft_s = self._draft_s * _DRAFT_MEMORY + seconds
        self._num_drafted = self._num_drafted * _DRAFT_MEMORY + num_tokens

    def observe_trip(self, seconds: float) -> None:
        self._estimate = None
        self._trips_s.append(seconds)

    def observe_target(self, token_s: float) -> None:
        """What the target takes for a token of a stream."""
        self._estimate = None
        self._targets_s.append(token_s)

    def observe_opening(self, forward_s: float, step_fixed_s: float = 0.0, step_token_s: float = 0.0) -> None:
        """What it took for a prompt: for one token no more than that. And what the verifier says of its
        steps, if it knows: this much, and this much a token."""
        self._estimate = None
        self._opening_s = forward_s
        if step_fixed_s or step_token_s:
            self._told = (step_fixed_s, step_token_s)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        """Something of each was observed (`is_known`). A verification that was never seen takes what the
        target does."""
        if self._estimate is None:
            self._estimate = self._make_estimate()
        return self._estimate

    def _make_estimate(self) -> tuple[ModelCosts, LinkCosts]:
        target_s = self._target_s()
        base_s, token_s = target_s * (1 - _TOKEN_GUESS), target_s * _TOKEN_GUESS
        if self._num_rounds:
            base_s, token_s = self._verify.line(self._told[1] if self._told else None)
        elif self._told:
            base_s, token_s = self._told
        models = ModelCosts(
            draft_token_s=self._draft_s / self._num_drafted,
            target_token_s=target_s,
            verify_fixed_s=base_s + token_s,
            verify_token_s=token_s,
        )
        return models, LinkCosts(rtt_s=max(statistics.median(self._trips_s), _MIN_RTT_S))

    def _target_s(self) -> float:
        """A token of the target alone: of a stream, or what the line says once lengths differed. Until then
        no more than the opening's prompt or a verification."""
        if self._targets_s:
            return statistics.median(self._targets_s)
        known_s = [] if self._opening_s is None else [self._opening_s]
        if self._num_rounds:
            if self._told or self._verify.is_sloped:
                return sum(self._verify.line(self._told[1] if self._told else None))
            known_s.append(self._verify.middle_s)
        elif self._told:
            known_s.append(sum(self._told))
        return min(known_s, default=0.0)
