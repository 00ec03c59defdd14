"""Which way of working makes the rest of a text soonest: by the one cost model, from what was measured. Pure.

A way is left only for one that is expected to save more of the rest's time than the change costs, a trip, and
a share of it besides: two ways that cost the same must not take turns.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from common.costmodel import LinkCosts, ModelCosts, cloud_only_s, fastest_round, tokens_per_s
from common.costmodel_pipelined import num_in_flight
from edge_client.depth.acceptance import MAX_DEPTH
from edge_client.depth.conditions import Conditions, coupled_token_s
from edge_client.stats import RoundRecord

MAX_IN_FLIGHT = 16
_HORIZON = 256  # tokens: a text may end long before its limit
_LEAST_GAIN = 0.03  # of the rest's time
_FIRST_ROUNDS = 2  # before their times are believed
_EVERY = 4  # rounds, or looks while streaming, between two decisions
_LENGTH_MEMORY = 0.8  # weight that the mean draft length keeps with every later round
_SHADOW_RUN = 8
_GUESSED = 0.3  # of rejections, while no rounds were pipelined: less than with any draft that is fast
_CAUTION = 0.5  # standard errors of the acceptance


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

    def __init__(
        self, ways: Sequence[Way], has_best_length: bool = True, may_guess: bool = False
    ) -> None:
        self.current = ways[0]
        self.conditions = Conditions(_GUESSED if may_guess else 0.0)
        self.num_changes = 0
        self._ways = tuple(ways)
        self._has_best_length = has_best_length
        self._mean_length = 0.0
        self._num_seen = 0
        self._shadow_run = 0  # tokens in a row that the draft would have said

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
        if record.is_answered:
            self._num_seen += 1

    def observe_stream(self, token_s: float) -> None:
        """Between two tokens of a stream."""
        self.conditions.costs.observe_target(token_s)
        self._num_seen += 1

    def observe_shadow(self, is_right: bool, draft_s: float) -> None:
        """Of a token that was streamed: whether the draft would have said it, and what that took."""
        self.conditions.costs.observe_draft(draft_s, 1)
        self._shadow_run += is_right
        if not is_right or self._shadow_run == _SHADOW_RUN:  # what a round would have shown
            self.conditions.positions.observe(self._shadow_run, self._shadow_run + (not is_right))
            self._shadow_run = 0

    def observe_trip(self, trip_s: float) -> None:
        """Measured beside a stream, which tells nothing of trips."""
        self.conditions.costs.observe_trip(trip_s)

    # ---------------------------------------------------------------------------------------- decisions

    def leave_stream(self) -> None:
        """It broke, and rounds know what to do without a link."""
        self.current = self._ways[0]

    def choose(self, num_remaining: int) -> Way:
        """The way to go on in, `current` from now on."""
        is_first = self._num_seen == 0
        if not self.conditions.are_known or (0 < self._num_seen < _FIRST_ROUNDS):
            return self.current
        if len(self._ways) > 1 and (is_first or self._num_seen % _EVERY == 0):
            self._decide(min(num_remaining, _HORIZON), 0.0 if is_first else _LEAST_GAIN)
        return self.current

    def _decide(self, num_tokens: int, least_gain: float) -> None:
        models, link = self.conditions.estimate()
        seconds = {way: num_tokens * self.token_s(way, models, link) for way in self._ways}
        for way in self._ways:
            if Way.CLOUD_ONLY in (way, self.current) and way is not self.current:
                seconds[way] += link.rtt_s
        best = min(seconds, key=seconds.__getitem__)
        if seconds[best] < (1 - least_gain) * seconds[self.current]:
            self.num_changes += self._num_seen > 0
            self.current = best

    def token_s(self, way: Way, models: ModelCosts, link: LinkCosts) -> float:
        """Expected seconds a token."""
        if way is Way.CLOUD_ONLY:
            return cloud_only_s(models, link)
        acceptance, length = self._acceptance(), max(1, round(self._mean_length))
        if way is Way.PIPELINED:
            if self._has_best_length:
                return self.conditions.fastest_pipelined(acceptance)[1]
            guessed = self.conditions.guessed
            return coupled_token_s(acceptance, length, models, link, MAX_IN_FLIGHT, guessed)
        if self._has_best_length:
            return 1.0 / fastest_round(acceptance, models, link, MAX_DEPTH)[1]
        return 1.0 / tokens_per_s(acceptance, length, models, link)

    def _acceptance(self) -> float:
        """A stream is left for rounds only where they are better by less luck than was seen."""
        positions = self.conditions.positions
        is_safe = self.current is Way.CLOUD_ONLY and self._num_seen > 0
        return positions.overall() - (_CAUTION * positions.error() if is_safe else 0.0)

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
