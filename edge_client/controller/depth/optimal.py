"""Draft as many tokens as give the most committed tokens a second, by the cost model and measured rounds.

Rounds follow one another, so a second of drafting is worth the rate they run at (the cost model's best). One
more token costs `round_token_s` and is committed with P(it and all before it are accepted); once that is less
than what the rate commits meanwhile, the draft ends. The confidences of the tokens drafted so far give their
part of P, the position that of the next token. A draft without confidences gets the best length.

Where several rounds may be in flight the edge drafts on whatever the length is, which then only sets how
often a message is sent: the length of the cost model's fastest pipelined rounds. No low confidence ends such
a round. The last round's record shows whether several may be in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.common.types import Signals
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.cost_model import fastest_round, round_token_s
from outrider.edge_client.controller.settings import MAX_DEPTH
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop, Stop


@dataclass(frozen=True, slots=True)
class _Plan:
    best: int  # draft length without confidences
    least_gain: float  # expected tokens that a further one must bring
    alphas: list[float]  # [MAX_DEPTH], by position


class OptimalDepth:
    """Chooses the length by the cost model; `start` holds until a draft was answered."""

    MIN_DEPTH, MAX_DEPTH = 1, MAX_DEPTH

    def __init__(self, start: int = 6) -> None:
        self._conditions = Conditions()
        self._acceptance = self._conditions.acceptance
        self._window = 1
        self._start = start
        self._plan: _Plan | None = None

    def next_depth(self) -> int:
        """See `DepthPolicy.next_depth`."""
        if self._plan is None:
            return self._start
        return MAX_DEPTH if self._acceptance.has_confidences and self._window == 1 else self._plan.best

    def stop_rule(self) -> ShouldStop | None:
        """See `DepthPolicy.stop_rule`."""
        if self._plan is None or not self._acceptance.has_confidences or self._window > 1:
            return None
        acceptance = self._acceptance.by_confidence()
        alphas, least_gain = self._plan.alphas, self._plan.least_gain
        reached = 1.0  # P(all tokens so far are accepted)

        def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            nonlocal reached
            if num_drafted == MAX_DEPTH:
                return Stop.AFTER
            reached *= acceptance(1.0 if signals is None else math.exp(-signals.nll))
            return Stop.AFTER if reached * alphas[num_drafted] < least_gain else Stop.NO

        return should_stop

    def observe(self, record: RoundRecord) -> None:
        """See `DepthPolicy.observe`. Unanswered rounds change no plan."""
        self._conditions.observe(record)
        if not record.is_answered:
            return
        self._window = record.window
        if self._conditions.are_known:
            self._plan = self._make_plan()

    def _make_plan(self) -> _Plan:
        if self._window > 1:
            alpha = self._acceptance.overall()
            return _Plan(self._conditions.fastest_pipelined(alpha)[0], 0.0, [])
        models, link = self._conditions.estimate()
        alphas = self._acceptance.by_position()
        best, rate = fastest_round(alphas, models, link, MAX_DEPTH)
        return _Plan(best, rate * round_token_s(models, link), alphas)
