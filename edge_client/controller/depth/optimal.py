"""As many tokens as make the most committed tokens a second, by the cost model and what rounds measured.

Rounds follow one another, so time is worth the rate they run at (the best one of the cost model). One more
token costs `round_token_s` and brings a token where it and all before it stand; once that is less than the
rate makes meanwhile, the draft ends. How likely the tokens drafted so far stand is told by their confidences,
how likely the next one by its position. A draft that tells nothing of its confidence gets the best length.

Where several rounds may be under way the edge drafts on whatever the length, which then only says how often
something is sent: about as often as the verifier can take it, by the cost model's pipelined rounds. No doubt
ends such a round. Whether there may be several, the last round's record says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.common.types import Signals
from outrider.edge_client.controller.cost_model import fastest_round, round_token_s
from outrider.edge_client.controller.depth.acceptance import MAX_DEPTH, ConfidenceCalibration
from outrider.edge_client.controller.depth.conditions import Conditions
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop, Stop

DEFAULT_START = 6


@dataclass(frozen=True, slots=True)
class _Plan:
    best: int  # draft length, had the draft no opinion of its tokens
    least_gain: float  # expected tokens that a further one must bring
    alphas: list[float]  # [MAX_DEPTH], by position


class OptimalDepth:
    """`start` in 1 … MAX_DEPTH is the length until a round with a draft was answered."""

    def __init__(self, start: int = DEFAULT_START) -> None:
        self._conditions = Conditions()
        self._window = 1
        self._calibration = ConfidenceCalibration()
        self._start = start
        self._plan: _Plan | None = None

    def next_depth(self) -> int:
        if self._plan is None:
            return self._start
        return MAX_DEPTH if self._calibration.is_known and self._window == 1 else self._plan.best

    def stop_rule(self) -> ShouldStop | None:
        if self._plan is None or not self._calibration.is_known or self._window > 1:
            return None
        acceptance = self._calibration.curve()
        alphas, least_gain = self._plan.alphas, self._plan.least_gain
        reached = 1.0  # probability that all tokens so far stand

        def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
            nonlocal reached
            if num_drafted == MAX_DEPTH:
                return Stop.AFTER
            reached *= acceptance(1.0 if signals is None else math.exp(-signals.nll))
            return Stop.AFTER if reached * alphas[num_drafted] < least_gain else Stop.NO

        return should_stop

    def observe(self, record: RoundRecord) -> None:
        """Unanswered rounds tell neither what stands nor what a trip takes."""
        self._conditions.observe(record)
        if not record.is_answered:
            return
        self._window = record.window
        if record.num_draft_tokens:
            self._calibration.observe(record.confidences, record.num_accepted_tokens)
        if self._conditions.are_known:
            self._plan = self._make_plan()

    def _make_plan(self) -> _Plan:
        if self._window > 1:
            alpha = self._conditions.positions.overall()
            return _Plan(self._conditions.fastest_pipelined(alpha)[0], 0.0, [])
        models, link = self._conditions.estimate()
        alphas = self._conditions.positions.estimate()
        best, rate = fastest_round(alphas, models, link, MAX_DEPTH)
        return _Plan(best, rate * round_token_s(models, link), alphas)
