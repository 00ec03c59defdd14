"""One token more after a round that went well, one less after one that went badly."""

from __future__ import annotations

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

MIN_DEPTH, MAX_DEPTH = 3, 12
DEFAULT_START = 6
_UP_AT, _DOWN_AT = 0.8, 0.4  # accepted : drafted of the last round


class RatioDepth:
    """`start` in MIN_DEPTH … MAX_DEPTH."""

    def __init__(self, start: int = DEFAULT_START) -> None:
        self._depth = start

    def next_depth(self) -> int:
        return self._depth

    def stop_rule(self) -> ShouldStop | None:
        return None

    def observe(self, record: RoundRecord) -> None:
        if not record.is_answered or not record.num_draft_tokens:
            return  # says nothing about acceptance
        if record.la_over_k >= _UP_AT:
            self._depth = min(self._depth + 1, MAX_DEPTH)
        elif record.la_over_k <= _DOWN_AT:
            self._depth = max(self._depth - 1, MIN_DEPTH)
