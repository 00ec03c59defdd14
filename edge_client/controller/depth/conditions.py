"""What a session measured of its models, its link and what stands of its drafts, for the cost model. Pure."""

from __future__ import annotations

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, round_s
from outrider.edge_client.controller.cost_model_pipelined import pipelined_token_s
from outrider.edge_client.controller.depth.acceptance import MAX_DEPTH, PositionAcceptance
from outrider.edge_client.controller.depth.costs import RoundCosts
from outrider.edge_client.core.stats import RoundRecord

_GUESS_MEMORY = 0.98  # weight a rejection keeps with every later one
_SPARED = 0.6  # of a trip, by a guess that came true: others were drafted and sent before it
_GUESS_WEIGHT = 8.0  # of what is expected beforehand, in rejections


def coupled_token_s(
    alpha: float,
    num_draft_tokens: int,
    models: ModelCosts,
    link: LinkCosts,
    max_in_flight: int | None = None,
    guessed: float = 0.0,
) -> float:
    """Seconds a token of pipelined rounds that bring a bonus: where a round's first token falls, the verdict
    before its own says so, a period earlier than the cost model's rounds without one have it. Behind the
    share `guessed` of all rejections the next round is under way already, which spares most of a trip."""
    seconds = pipelined_token_s(alpha, num_draft_tokens, models, link, max_in_flight)
    verify_s = models.verify_s(num_draft_tokens)
    period_s = max(num_draft_tokens * models.draft_token_s, verify_s)
    whole = alpha**num_draft_tokens
    seconds -= period_s * (1 - alpha) ** 2 * whole / (1 - whole)
    spared_s = _SPARED * (round_s(num_draft_tokens, models, link) - verify_s)
    return seconds - guessed * (1 - alpha) * spared_s


class Conditions:
    """As of the last rounds that were shown."""

    def __init__(self, guessed: float = 0.0) -> None:
        """`guessed`: of rejections, expected to be guessed while nothing is known of it."""
        self._num_falls, self._num_guessed = _GUESS_WEIGHT, _GUESS_WEIGHT * guessed
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
        if record.window > 1:
            self._observe_guess(record)
        if not record.is_answered:
            return
        self.costs.observe(record)
        if record.num_draft_tokens:
            self.positions.observe(record.num_accepted_tokens, record.num_draft_tokens)

    def _observe_guess(self, record: RoundRecord) -> None:
        has_fallen = record.is_answered and record.num_accepted_tokens < record.num_draft_tokens
        if has_fallen or record.is_first_wrong:
            self._num_falls = _GUESS_MEMORY * self._num_falls + 1
            self._num_guessed = _GUESS_MEMORY * self._num_guessed
        self._num_guessed += record.is_guess_hit

    @property
    def guessed(self) -> float:
        """The share of rejections behind which a guess came true."""
        return min(1.0, self._num_guessed / self._num_falls)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        return self.costs.estimate()

    def fastest_pipelined(self, acceptance: float) -> tuple[int, float]:
        """The length of pipelined rounds of the fewest seconds a token, and those seconds: downhill from the
        last answer, which costs a tenth of looking at all lengths."""
        models, link = self.estimate()

        def token_s(length: int) -> float:
            return coupled_token_s(acceptance, length, models, link, guessed=self.guessed)

        best_s = token_s(self._length)
        for step in (4, -4, 1, -1):
            while 1 <= self._length + step <= MAX_DEPTH and (next_s := token_s(self._length + step)) < best_s:
                self._length, best_s = self._length + step, next_s
        return self._length, best_s
