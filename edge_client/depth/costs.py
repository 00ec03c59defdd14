"""What rounds cost lately, in the terms of the cost model. Pure.

Medians rather than means: a verifier's first forwards, a slow step or a stalled packet say nothing of the
next round, and one of them in a mean would shorten drafts for many.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

from common.costmodel import LinkCosts, ModelCosts
from edge_client.stats import RoundRecord

_NUM_TRIPS = 7  # a step of the link is believed once it is most of the last trips
_NUM_VERIFICATIONS = 15
_TOKEN_SHARE = (
    0.3  # of a verification that counts per token, until lengths differed: most of a forward is fixed
)
_SHARE_WEIGHT = 12.0  # belief in that, as so many tokens' difference in length
_DRAFT_MEMORY = 0.95  # weight that a round's drafting keeps with every later one
_MIN_RTT_S = 1e-6


class VerifyTimes:
    """A verification as base + per token: the line whose slope is the median of those between all pairs of
    recent rounds (Theil 1950, Sen 1968), a pair weighing what its lengths differ by."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_NUM_VERIFICATIONS)  # tokens, seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._rounds.append((num_tokens, seconds))

    def line(self) -> tuple[float, float]:
        """Seconds for no token, and for each one; none is negative. At least one round was observed."""
        mean_tokens = statistics.fmean(n for n, _ in self._rounds)
        middle_s = statistics.median(t for _, t in self._rounds)
        slopes = [(_TOKEN_SHARE * middle_s / mean_tokens, _SHARE_WEIGHT)]
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
        self._draft_s = 0.0
        self._num_drafted = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_drafted > 0

    def observe(self, record: RoundRecord) -> None:
        """An answered round. A co-located one has no `net_ms`, and its forward for the verifier's time."""
        self._draft_s = self._draft_s * _DRAFT_MEMORY + record.draft_ms / 1e3
        self._num_drafted = self._num_drafted * _DRAFT_MEMORY + record.num_draft_tokens
        self._verify.observe(record.num_draft_tokens + 1, (record.verifier_ms or record.forward_ms) / 1e3)
        self._trips_s.append(record.net_ms / 1e3)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        base_s, token_s = self._verify.line()
        models = ModelCosts(
            draft_token_s=self._draft_s / self._num_drafted,
            target_token_s=base_s + token_s,
            verify_fixed_s=base_s + token_s,
            verify_token_s=token_s,
        )
        return models, LinkCosts(rtt_s=max(statistics.median(self._trips_s), _MIN_RTT_S))
