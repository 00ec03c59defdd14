"""The interface of depth policies, which decide from observed rounds and from nothing else."""

from __future__ import annotations

from typing import Protocol

from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop


class DepthPolicy(Protocol):
    """Chooses draft lengths. Pure; the session clips them to the end of the sequence, the context and the
    verifier's limit."""

    def next_depth(self, num_assumed: int = 0) -> int:
        """Returns the most tokens to draft in the next round, after `num_assumed` drafted ones that are in flight."""

    def stop_rule(self) -> ShouldStop | None:
        """Returns the rule that may end the next draft before `next_depth` tokens; None: nothing does."""

    def observe(self, record: RoundRecord) -> None:
        """Adds a round, answered or not (`is_answered`)."""
