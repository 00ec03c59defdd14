"""The length at which the acceptance rate over the last ten rounds is near a target."""

from __future__ import annotations

from collections import deque

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

MIN_DEPTH, MAX_DEPTH = 2, 8
DEFAULT_START = 4
_NUM_ROUNDS = 10
_LOWEST, _HIGHEST = 0.6, 0.8  # accepted : drafted over the window: the target of 0.7, a tenth off


class WindowDepth:
    """`start` in MIN_DEPTH … MAX_DEPTH. Each round may change the length by one."""

    def __init__(self, start: int = DEFAULT_START) -> None:
        self._depth = start
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_NUM_ROUNDS)  # accepted, drafted

    def next_depth(self) -> int:
        return self._depth

    def stop_rule(self) -> ShouldStop | None:
        return None

    def observe(self, record: RoundRecord) -> None:
        if not record.is_answered or not record.num_draft_tokens:
            return  # says nothing about acceptance
        self._rounds.append((record.num_accepted_tokens, record.num_draft_tokens))
        rate = sum(accepted for accepted, _ in self._rounds) / sum(drafted for _, drafted in self._rounds)
        if rate > _HIGHEST:
            self._depth = min(self._depth + 1, MAX_DEPTH)
        elif rate < _LOWEST:
            self._depth = max(self._depth - 1, MIN_DEPTH)
