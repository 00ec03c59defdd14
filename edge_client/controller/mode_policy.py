"""Which way of working makes the rest of a text soonest: by the one cost model, from what was measured. Pure.

How much of a draft stands is not known, but believed more and more. A way's prospect is the expected time of
the rest if it is taken now, holds for the tokens until the next decision, and the best way takes over then,
as if the acceptance were known by then. So a way that costs little while it shows how good the draft is may
go before one that is expected to be somewhat faster, and none is entered on luck that is dear to leave.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

from outrider.edge_client.controller.acceptance_posterior import ALPHAS, beliefs
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, cloud_only_s, tokens_per_s
from outrider.edge_client.controller.cost_model_pipelined import num_in_flight
from outrider.edge_client.controller.depth.conditions import Conditions, coupled_token_s
from outrider.edge_client.core.stats import RoundRecord

MAX_IN_FLIGHT = 16
_HORIZON = 256  # tokens: a text may end long before its limit
_SOON = 16  # tokens until the next decision, about
_LEAST_GAIN = 0.03  # of the time until then: two ways that cost the same must not take turns
_PIPELINED_MORE = 0.03  # what pipelined rounds take more than the model says: no doubt ends their drafts
_SAME = 0.03  # share that a cost may change by
_FIRST_ROUNDS = 2  # before their times are believed
_OFTEN, _EVERY = 16, 4  # after a change that many rounds, or looks while streaming, are each decided after
_LENGTH_MEMORY = 0.8  # weight that the mean draft length keeps with every later round
_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)  # the best of which is near enough to the best
_MEMORY = 0.997  # weight that a judged token keeps with every later one
_OPEN = 0.02  # probability of rounds, while streaming, that makes it worth to look at every token
_MOST_BUSY = 0.5  # of the time between two streamed tokens, that drafting beside them may take
_GUESSED = 0.3  # of rejections, while no rounds were pipelined: less than with any draft that is fast


class Way(enum.StrEnum):
    SYNCHRONOUS = "synchronous"  # a round, then its verdict
    PIPELINED = "pipelined"  # several rounds under way
    CLOUD_ONLY = "cloud-only"  # the target alone, streamed


class ModeChoice:
    """Among `ways`, the first of which holds until something is known.

    `has_best_length`: the depth policy takes the best length of each way; else rounds stay as they are.
    `may_guess`: rounds behind guesses at a rejection may be sent while it pipelines.
    Shown: an opening, rounds, and while the target streams its tokens' times, what the draft would have said,
    and trips.
    """

    def __init__(self, ways: Sequence[Way], has_best_length: bool = True, may_guess: bool = False) -> None:
        self.current = ways[0]
        self.conditions = Conditions(_GUESSED if may_guess else 0.0)
        self.num_changes = 0
        self._ways = tuple(ways)
        self._has_best_length = has_best_length
        self._mean_length = 0.0
        self._num_seen = 0  # rounds, and looks while streaming
        self._changed_at = 0  # of them
        self._chance_of_rounds = 1.0
        self._costs: tuple[float, ...] = ()
        self._table: _Times = {}  # of those
        self._first_belief: Sequence[float] | None = None
        self._num_stood = self._num_fell = 0.0  # of judged tokens, those of long ago forgotten

    @property
    def belief(self) -> list[float]:
        """The probability of each of ALPHAS to be the chance of a drafted token to stand."""
        return beliefs(self._num_stood, self._num_fell, self._first_belief)

    @property
    def has_judged(self) -> bool:
        return self._num_stood + self._num_fell > 0

    def expect(self, belief: Sequence[float]) -> None:
        """What to begin with, before any token of this text was judged (`controller.acceptance_prior`)."""
        self._first_belief = belief

    # ------------------------------------------------------------------------------------ measurements

    def observe_opening(
        self,
        trip_s: float,
        forward_s: float,
        draft_token_s: float,
        step_fixed_s: float = 0.0,
        step_token_s: float = 0.0,
    ) -> None:
        """`forward_s`: of the prompt. `step_*`: the verifier's word for its steps, 0 where it has none."""
        costs = self.conditions.costs
        costs.observe_trip(trip_s)
        costs.observe_draft(draft_token_s, 1)
        costs.observe_opening(forward_s, step_fixed_s, step_token_s)

    def observe(self, record: RoundRecord) -> None:
        self.conditions.observe(record)
        if record.num_draft_tokens:
            length = self._mean_length or record.num_draft_tokens
            self._mean_length = _LENGTH_MEMORY * length + (1 - _LENGTH_MEMORY) * record.num_draft_tokens
        if record.is_first_wrong:
            self._judge(0, 1)
        if record.is_answered:
            self._num_seen += 1
            self._judge(record.num_accepted_tokens, int(record.num_accepted_tokens < record.num_draft_tokens))

    def observe_stream(self, token_s: float) -> None:
        """Between two tokens of a stream."""
        self.conditions.costs.observe_target(token_s)
        self._num_seen += 1

    def observe_shadow(self, is_right: bool, draft_s: float) -> None:
        """Of a token that was streamed: whether the draft would have said it, and what that took."""
        self.conditions.costs.observe_draft(draft_s, 1)
        self._judge(int(is_right), int(not is_right))

    def _judge(self, num_stood: int, num_fell: int) -> None:
        kept = _MEMORY ** (num_stood + num_fell)
        self._num_stood = kept * self._num_stood + num_stood
        self._num_fell = kept * self._num_fell + num_fell

    def observe_trip(self, trip_s: float) -> None:
        """Measured beside a stream, which tells nothing of trips."""
        self.conditions.costs.observe_trip(trip_s)

    def wants_shadow(self, num_streamed: int) -> bool:
        """Whether to draft what follows the first `num_streamed` tokens of a stream: every fourth; each while
        it may yet be left, if drafting keeps pace with it."""
        if num_streamed % _EVERY == 0 or not self.conditions.are_known:
            return True
        models, _ = self.conditions.estimate()
        keeps_pace = models.draft_token_s < _MOST_BUSY * models.target_token_s
        return keeps_pace and self._chance_of_rounds > _OPEN

    # ---------------------------------------------------------------------------------------- decisions

    def leave_stream(self) -> None:
        """It broke, and rounds know what to do without a link."""
        self.current = self._ways[0]

    def choose(self, num_remaining: int) -> Way:
        """The way to go on in, `current` from now on."""
        if num_remaining > 0 and len(self._ways) > 1 and self.conditions.are_known and self._is_due():
            self._decide(min(num_remaining, _HORIZON))
        return self.current

    def _is_due(self) -> bool:
        if 0 < self._num_seen < _FIRST_ROUNDS:
            return False
        return self._num_seen - self._changed_at < _OFTEN or self._num_seen % _EVERY == 0

    def _decide(self, num_tokens: int) -> None:
        models, link = self.conditions.estimate()
        times, weights = self._times(models, link), self.belief
        prospects = self._prospects(times, weights, num_tokens, link.rtt_s)
        best = min(prospects, key=prospects.__getitem__)
        if best is not self.current:
            self.num_changes += self._num_seen > 0
            self.current, self._changed_at = best, self._num_seen

    def _prospects(
        self, times: _Times, weights: Sequence[float], num_tokens: int, rtt_s: float
    ) -> dict[Way, float]:
        """Seconds for `num_tokens` that each way is expected to take. A stream begins after a trip; one that
        is left goes on for a trip, at its own pace."""
        soon = min(_SOON, num_tokens)
        later = num_tokens - soon
        all_rounds = [token_s for way, token_s in times.items() if way is not Way.CLOUD_ONLY]
        rounds = [min(each) for each in zip(*all_rounds, strict=True)]
        stream = times.get(Way.CLOUD_ONLY, [math.inf] * len(ALPHAS))
        leave = [rtt_s * max(0.0, 1.0 - r / s) for r, s in zip(rounds, stream, strict=True)]
        self._chance_of_rounds = sum(w for w, r, s in zip(weights, rounds, stream, strict=True) if r < s)
        behind_rounds_s = behind_stream_s = 0.0
        if later:
            each = list(zip(weights, rounds, stream, leave, strict=True))
            behind_rounds_s = sum(w * min(later * r, later * s + rtt_s) for w, r, s, _ in each)
            behind_stream_s = sum(w * min(later * s, later * r + left_s) for w, r, s, left_s in each)
        is_streaming = self.current is Way.CLOUD_ONLY
        found: dict[Way, float] = {}
        for way, token_s in times.items():
            is_change = way is not self.current and self._num_seen > 0
            hold_s = soon * (1 + _LEAST_GAIN * is_change) * _mean(weights, token_s)
            if way is Way.CLOUD_ONLY:
                found[way] = hold_s + behind_stream_s + rtt_s * (not is_streaming)
            else:
                found[way] = hold_s + behind_rounds_s + _mean(weights, leave) * is_streaming
        return found

    def _times(self, models: ModelCosts, link: LinkCosts) -> _Times:
        """Made anew once something changed by more than makes a difference: that takes a millisecond."""
        compute = (models.draft_token_s, models.target_token_s, models.verify_fixed_s, models.verify_token_s)
        length = 0.0 if self._has_best_length else self._mean_length
        costs = (*compute, link.rtt_s, length, 1.0 - self.conditions.guessed)
        if not self._table or any(abs(a - b) > _SAME * b for a, b in zip(costs, self._costs, strict=True)):
            self._costs = costs
            self._table = {way: self._token_times(way, models, link) for way in self._ways}
        return self._table

    def _token_times(self, way: Way, models: ModelCosts, link: LinkCosts) -> list[float]:
        """Seconds a token at each of ALPHAS."""
        if way is Way.CLOUD_ONLY:
            return [cloud_only_s(models, link)] * len(ALPHAS)
        if not self._has_best_length:
            n = max(1, round(self._mean_length))
            return [self._rounds_token_s(way, alpha, n, models, link) for alpha in ALPHAS]
        times, place = [], 0
        for alpha in ALPHAS:  # the better tokens stand the longer the best rounds are
            token_s = self._rounds_token_s(way, alpha, _LENGTHS[place], models, link)
            while place + 1 < len(_LENGTHS):
                longer_s = self._rounds_token_s(way, alpha, _LENGTHS[place + 1], models, link)
                if longer_s >= token_s:
                    break
                place, token_s = place + 1, longer_s
            times.append(token_s)
        return times

    def _rounds_token_s(
        self, way: Way, alpha: float, num_draft_tokens: int, models: ModelCosts, link: LinkCosts
    ) -> float:
        if way is Way.SYNCHRONOUS:
            return 1.0 / tokens_per_s(alpha, num_draft_tokens, models, link)
        most = None if self._has_best_length else MAX_IN_FLIGHT
        guessed = self.conditions.guessed
        return (1 + _PIPELINED_MORE) * coupled_token_s(alpha, num_draft_tokens, models, link, most, guessed)

    # ------------------------------------------------------------------------------------------- window

    @property
    def window(self) -> int:
        """Rounds to have under way at most: as many as fit into a trip and a verification while all stand."""
        if self.current is not Way.PIPELINED:
            return 1
        if not self.conditions.are_known or not self._mean_length:
            return 2
        models, link = self.conditions.estimate()
        return min(max(2, num_in_flight(max(1, round(self._mean_length)), models, link)), MAX_IN_FLIGHT)


_Times = Mapping[Way, Sequence[float]]


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
