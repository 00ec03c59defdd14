"""What a session measured of its models, its link and what stands of its drafts, for the cost model. Pure."""

from __future__ import annotations

from common.costmodel import LinkCosts, ModelCosts
from edge_client.depth.acceptance import PositionAcceptance
from edge_client.depth.costs import RoundCosts
from edge_client.stats import RoundRecord


class Conditions:
    """As of the last rounds that were shown."""

    def __init__(self) -> None:
        self.costs = RoundCosts()
        self.positions = PositionAcceptance()

    @property
    def are_known(self) -> bool:
        return self.costs.is_known

    def observe(self, record: RoundRecord) -> None:
        """Unanswered rounds tell neither what stands nor what a trip takes; a wrong guess tells of itself."""
        if record.is_first_wrong:
            self.positions.observe(0, 1)
        if not record.is_answered:
            return
        self.costs.observe(record)
        if record.num_draft_tokens:
            self.positions.observe(record.num_accepted_tokens, record.num_draft_tokens)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        return self.costs.estimate()
