"""Draft as many tokens as give the most committed tokens a second, by the cost model and measured rounds.

Rounds follow one another, so a second of drafting is worth the rate they run at (the cost model's best). One
more token costs `round_token_s` and is committed with P(it and all before it are accepted); once that is less
than what the rate commits meanwhile, the draft ends. The confidences of the tokens drafted so far give their
part of P, the position that of the next token. A draft without confidences gets the best length.

Where several rounds may be in flight the edge drafts on whatever the length is, which then only sets how
often a message is sent: the length of the cost model's fastest pipelined rounds. No low confidence ends such
a round. Of a draft that copies, which is right for long or not at all, rounds behind others are longer: they
are needed only where those before them were right.
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


@dataclass(slots=True)
class _Plan:
    best: int  # draft length without confidences, of pipelined rounds with none in flight
    least_gain: float  # expected tokens that a further one must bring
    alphas: list[float]  # [MAX_DEPTH], by position
    is_pipelined: bool
    later: int | None = None  # draft length of a pipelined round behind others; None: not planned yet


class OptimalDepth:
    """Chooses the length by the cost model.

    `start` holds until a draft was answered; where it is not given, `DEFAULT_START` until every cost is known,
    which an opening can tell. `conditions` are those that the session observes; without them it keeps its own.
    """

    MIN_DEPTH, MAX_DEPTH = 1, MAX_DEPTH
    DEFAULT_START = 6

    def __init__(self, start: int | None = None, conditions: Conditions | None = None) -> None:
        self._conditions = conditions or Conditions()
        self._is_observer = conditions is None
        self._acceptance = self._conditions.acceptance
        self._start = start
        self._plan: _Plan | None = None  # as of what was observed so far
        self._first_length = self._later_length = 4  # of the last pipelined plans: the next ones are near

    def next_depth(self, num_assumed: int = 0) -> int:
        """See `DepthPolicy.next_depth`."""
        plan = self._current()
        if plan is None:
            return self._start or self.DEFAULT_START
        if plan.is_pipelined and num_assumed and self._acceptance.is_copied:
            return self._plan_later(plan, num_assumed)
        return MAX_DEPTH if self._acceptance.has_confidences and not plan.is_pipelined else plan.best

    def stop_rule(self) -> ShouldStop | None:
        """See `DepthPolicy.stop_rule`."""
        plan = self._current()
        if plan is None or not self._acceptance.has_confidences or plan.is_pipelined:
            return None
        acceptance = self._acceptance.by_confidence()
        alphas, least_gain = plan.alphas, plan.least_gain
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
        if self._is_observer:
            self._conditions.observe(record)
            self._conditions.window = record.window
        if record.is_answered:
            self._start = self._plan = None

    def _current(self) -> _Plan | None:
        is_pipelined = self._conditions.window > 1
        if self._start is None and self._conditions.are_known:
            if self._plan is None or self._plan.is_pipelined is not is_pipelined:
                self._plan = self._make_plan(is_pipelined)
        return self._plan

    def _make_plan(self, is_pipelined: bool) -> _Plan:
        if is_pipelined:
            alphas = self._acceptance.of_runs()
            self._first_length, _ = self._conditions.fastest_pipelined(alphas, self._first_length)
            return _Plan(self._first_length, 0.0, [], is_pipelined)
        models, link = self._conditions.estimate()
        by_position = self._acceptance.by_position()
        best, rate = fastest_round(by_position, models, link, MAX_DEPTH)
        return _Plan(best, rate * round_token_s(models, link), by_position, is_pipelined)

    def _plan_later(self, plan: _Plan, num_assumed: int) -> int:
        if plan.later is None:  # as of the first such round
            alphas = self._acceptance.of_runs(num_assumed)
            plan.later, _ = self._conditions.fastest_pipelined(alphas, self._later_length)
            self._later_length = plan.later
        return plan.later
