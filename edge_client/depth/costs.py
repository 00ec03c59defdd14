"""What rounds cost lately, in the terms of the cost model. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from common.costmodel import LinkCosts, ModelCosts
from common.step_times import StepTimes
from edge_client.stats import RoundRecord

_NUM_TRIPS = 7  # a step of the link is believed once it is most of the last trips; a single outlier never
_MEMORY = 0.95  # weight that a round's compute keeps with every later one
_VERIFY_TOKEN_SHARE = 0.5  # of a verification, until two lengths were seen: much of a forward is fixed
_MIN_RTT_S = 1e-6


class RoundCosts:
    """The draft's time is per token, the verifier's a line over the tokens it feeds (the draft's and one
    more) with its queue in it, and the link's the median of the last trips.

    The link's rates are not told apart from its delay: the longest draft is some 800 bytes, which take less
    than what trips differ by on all but links of well under a megabit a second.
    """

    def __init__(self) -> None:
        self._verify = StepTimes(_VERIFY_TOKEN_SHARE, _MEMORY)
        self._trips_s: deque[float] = deque(maxlen=_NUM_TRIPS)
        self._draft_s = 0.0
        self._num_drafted = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_drafted > 0

    def observe(self, record: RoundRecord) -> None:
        """An answered round. A co-located one has no `net_ms`, and its forward for the verifier's time."""
        self._draft_s = self._draft_s * _MEMORY + record.draft_ms / 1e3
        self._num_drafted = self._num_drafted * _MEMORY + record.num_draft_tokens
        self._verify.observe(record.num_draft_tokens + 1, (record.verifier_ms or record.forward_ms) / 1e3)
        self._trips_s.append(record.net_ms / 1e3)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        one_token_s = self._verify.base_s + self._verify.token_s
        models = ModelCosts(
            draft_token_s=self._draft_s / self._num_drafted,
            target_token_s=one_token_s,
            verify_fixed_s=one_token_s,
            verify_token_s=self._verify.token_s,
        )
        return models, LinkCosts(rtt_s=max(statistics.median(self._trips_s), _MIN_RTT_S))
