"""What a session measured of its models, its link and what stands of its drafts, for the cost model. Pure."""

from __future__ import annotations

from common.costmodel import LinkCosts, ModelCosts
from common.costmodel_pipelined import pipelined_token_s
from edge_client.depth.acceptance import MAX_DEPTH, PositionAcceptance
from edge_client.depth.costs import RoundCosts
from edge_client.stats import RoundRecord


def coupled_token_s(
    alpha: float, num_draft_tokens: int, models: ModelCosts, link: LinkCosts, max_in_flight: int | None = None
) -> float:
    """Seconds a token of pipelined rounds that bring a bonus: where a round's first token falls, the verdict
    before its own says so, a period earlier than the cost model's rounds without one have it."""
    seconds = pipelined_token_s(alpha, num_draft_tokens, models, link, max_in_flight)
    period_s = max(num_draft_tokens * models.draft_token_s, models.verify_s(num_draft_tokens))
    whole = alpha**num_draft_tokens
    return seconds - period_s * (1 - alpha) ** 2 * whole / (1 - whole)


class Conditions:
    """As of the last rounds that were shown."""

    def __init__(self) -> None:
        self.costs = RoundCosts()
        self.positions = PositionAcceptance()
        self._length = 4

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

    def fastest_pipelined(self, acceptance: float) -> tuple[int, float]:
        """The length of pipelined rounds of the fewest seconds a token, and those seconds: downhill from the
        last answer, which costs a tenth of looking at all lengths."""
        models, link = self.estimate()

        def token_s(length: int) -> float:
            return coupled_token_s(acceptance, length, models, link)

        best_s = token_s(self._length)
        for step in (4, -4, 1, -1):
            while 1 <= self._length + step <= MAX_DEPTH and (next_s := token_s(self._length + step)) < best_s:
                self._length, best_s = self._length + step, next_s
        return self._length, best_s
