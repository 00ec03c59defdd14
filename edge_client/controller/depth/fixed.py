"""Draft the same number of tokens in every round."""

from __future__ import annotations

import sys

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

DEFAULT_DEPTH = 4


class FixedDepth:
    """Always answers `num_speculative_tokens`."""

    MIN_DEPTH, MAX_DEPTH = 0, sys.maxsize

    def __init__(self, num_speculative_tokens: int = DEFAULT_DEPTH) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def next_depth(self, num_assumed: int = 0) -> int:
        """See `DepthPolicy.next_depth`."""
        return self._num_speculative_tokens

    def stop_rule(self) -> ShouldStop | None:
        """See `DepthPolicy.stop_rule`."""
        return None

    def observe(self, record: RoundRecord) -> None:
        """See `DepthPolicy.observe`; nothing is learned."""
