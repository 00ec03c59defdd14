"""Keep the acceptance rate over the last ten rounds near a target."""

from __future__ import annotations

from collections import deque

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

MIN_DEPTH, MAX_DEPTH = 2, 8
DEFAULT_START = 4
_NUM_ROUNDS = 10
_LOWEST, _HIGHEST = 0.6, 0.8  # accepted : drafted over the window: the target of 0.7, a tenth off


class WindowDepth:
    """Moves the length by at most one a round, from `start` within MIN_DEPTH to MAX_DEPTH."""

    def __init__(self, start: int = DEFAULT_START) -> None:
        self._depth = start
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_NUM_ROUNDS)  # accepted, drafted

    def next_depth(self) -> int:
        """See `DepthPolicy.next_depth`."""
        return self._depth

    def stop_rule(self) -> ShouldStop | None:
        """See `DepthPolicy.stop_rule`."""
        return None

    def observe(self, record: RoundRecord) -> None:
        """See `DepthPolicy.observe`."""
        if not record.is_answered or not record.num_draft_tokens:
            return  # has no acceptance rate
        self._rounds.append((record.num_accepted_tokens, record.num_draft_tokens))
        rate = sum(accepted for accepted, _ in self._rounds) / sum(drafted for _, drafted in self._rounds)
        if rate > _HIGHEST:
            self._depth = min(self._depth + 1, MAX_DEPTH)
        elif rate < _LOWEST:
            self._depth = max(self._depth - 1, MIN_DEPTH)
