"""Draft one token more after a round of high acceptance, one less after one of low acceptance."""

from __future__ import annotations

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

MIN_DEPTH, MAX_DEPTH = 3, 12
DEFAULT_START = 6
_UP_AT, _DOWN_AT = 0.8, 0.4  # accepted : drafted of the last round


class RatioDepth:
    """Moves the length by the last round's acceptance rate, from `start` within MIN_DEPTH to MAX_DEPTH."""

    def __init__(self, start: int = DEFAULT_START) -> None:
        self._depth = start

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
        if record.la_over_k >= _UP_AT:
            self._depth = min(self._depth + 1, MAX_DEPTH)
        elif record.la_over_k <= _DOWN_AT:
            self._depth = max(self._depth - 1, MIN_DEPTH)
