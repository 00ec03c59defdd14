"""The choice of the execution mode: which one is expected to finish the rest of a sequence first. Pure.

The acceptance rate is known as a posterior only. A mode's prospect is the expected time of the rest if the
mode is taken now and held until the next decision, and the best mode is taken from then on, as if the
acceptance rate were known by then. So a mode that is cheap while it shows how good the draft is may be
preferred to one that is expected to be slightly faster, and no mode is entered by chance that is expensive to
leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.controller import pace_tables
from outrider.edge_client.controller.acceptance_posterior import ALPHAS, AcceptancePosterior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.cost_model import (
    LinkCosts,
    ModelCosts,
    cloud_only_s,
    round_s,
    rounds_start_s,
)
from outrider.edge_client.controller.cost_model_pipelined import (
    PipelinedTimes,
    num_in_flight,
    pipelined_start_s,
    pipelined_times,
)
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import tree_costs
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.trees import DEFAULT_NODES, TreeCosts

CHOOSABLE_MODES = (ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED, ExecutionMode.CLOUD_ONLY)
_STREAM = ExecutionMode.CLOUD_ONLY


class _Pace(NamedTuple):
    """Holds what a mode takes at each of `ALPHAS`."""

    token_s: NDArray[np.float64]  # for each token
    start_s: NDArray[np.float64]  # and once


class ModePolicy:
    """Chooses among `modes` (of `CHOOSABLE_MODES`), the first of which holds until costs are known.

    It observes an opening, rounds, and while the target streams: the times of its tokens, what the draft
    would have proposed (probes), and round trips.
    """

    def __init__(
        self,
        modes: Sequence[ExecutionMode],
        length: int | None = None,
        conditions: Conditions | None = None,
        *,
        has_trees: bool = False,
    ) -> None:
        """`length` is what rounds draft to begin with, and keep about; None: the depth policy takes the best
        length of each mode. `conditions` are those that the session observes; None: its own. `has_trees`: one round
        at a time may be a tree, where that is faster."""
        self.current = modes[0]
        self.conditions = conditions or Conditions()
        self._is_observer = conditions is None
        self.num_changes = 0
        self.reason = "first" if len(modes) > 1 else "given"  # why `current` is: see `Stretch.reason`
        self.expected_ms: dict[ExecutionMode, float] = {}  # a token in each mode, at the last decision
        self._modes = tuple(modes)
        self._has_best_length = length is None
        self._has_trees = has_trees
        self._mean_length = float(length or 0)
        self._num_observed = 0  # rounds, and measurements of a stream
        self._changed_at = 0  # of them
        self._decided_at = 0
        # As of the last decision: that rounds are faster, and whether drafting beside a stream keeps pace with it.
        self._round_probability, self._keeps_pace = 1.0, True
        self._table: _TimeTable | None = None
        self._is_prepared = False  # for the first decision

    @property
    def may_stream(self) -> bool:
        """Returns whether the target's own stream is among the modes."""
        return _STREAM in self._modes

    @property
    def posterior(self) -> AcceptancePosterior:
        """Returns the posterior of the acceptance rate, which may start from a prior."""
        return self.conditions.acceptance.posterior

    # ------------------------------------------------------------------------------------ measurements

    def observe(self, record: RoundRecord) -> None:
        """Adds a round, answered or not."""
        if self._is_observer:
            self.conditions.observe(record)
        self._num_observed += record.is_answered
        if record.num_draft_tokens:
            memory = SETTINGS.length_memory_per_round
            length = self._mean_length or record.num_draft_tokens
            self._mean_length = memory * length + (1 - memory) * record.num_draft_tokens

    def observe_stream(self, token_s: float, num_active: int = 0) -> None:
        """Adds the time between two tokens of the target's stream; see `RoundCosts.observe_target`."""
        self.conditions.observe_stream(token_s, num_active)
        self._num_observed += 1

    def observe_probe(self, is_accepted: bool, draft_s: float | None) -> None:
        """Adds a probe: whether the draft would have proposed the token that was streamed, and the time of drafting it
        as in a round; None where it was not."""
        if draft_s is not None:
            self.conditions.costs.observe_draft(draft_s, 1)
        self.posterior.observe(int(is_accepted), int(not is_accepted))

    def observe_rtt(self, rtt_s: float) -> None:
        """Adds a round trip measured beside a stream, whose tokens do not show it."""
        self.conditions.costs.observe_rtt(rtt_s)

    def should_probe_draft(self, num_streamed: int) -> bool:
        """Returns whether to draft what follows the first `num_streamed` tokens of a stream.

        Every token is probed while rounds may yet be better and drafting keeps pace; of a draft that is most
        likely useless few are, as probing takes processor time that the target may share. Both are as of the last
        decision: a new estimate for each token takes as long as all else that a token costs.
        """
        if not self.conditions.are_known:
            return True
        if self._round_probability <= SETTINGS.min_round_probability:
            return num_streamed % SETTINGS.probe_useless_every_tokens == 0
        return self._keeps_pace or num_streamed % SETTINGS.probe_every_tokens == 0

    # ---------------------------------------------------------------------------------------- decisions

    def leave_stream(self) -> None:
        """Returns to the first mode after a broken stream: rounds have a fallback without a link."""
        self.current, self.reason, self.expected_ms = self._modes[0], "stream_lost", {}

    def choose(self, num_remaining: int) -> ExecutionMode:
        """Decides where a decision is due; returns the mode to continue in, which `current` then is."""
        if num_remaining > 0 and len(self._modes) > 1 and self.conditions.are_known and self._is_due():
            self._decide(min(num_remaining, SETTINGS.horizon_tokens))
        return self.current

    def prepare(self) -> None:
        """Tabulates times by what earlier sequences found, if they did, before an opening. The decision after it, for
        which the first draft waits, is made by these where rounds are short: two rounds later it is made again."""
        if len(self._modes) > 1 and self.conditions.are_known:
            models, link = self.conditions.estimate()
            table = self._current_table(models, link)
            for mode in self._modes:
                table.pace(mode)
            self._is_prepared = round_s(1, models, link) < SETTINGS.short_round_ms / 1e3

    def _is_due(self) -> bool:
        if self._num_observed < SETTINGS.min_rounds:
            return not self._num_observed
        is_recent = self._num_observed - self._changed_at < SETTINGS.dense_decisions
        is_recent = is_recent and not self.conditions.costs.is_shared  # where a text seldom changes its mode
        return self._num_observed - self._decided_at >= (1 if is_recent else SETTINGS.decision_every)

    def _decide(self, num_tokens: int) -> None:
        self._decided_at = self._num_observed
        is_prepared, self._is_prepared = self._is_prepared, False
        table = self._table if is_prepared else self._current_table(*self.conditions.estimate())
        assert table is not None
        weights = np.array(self.posterior.probabilities)
        weights[weights <= SETTINGS.min_alpha_probability] = 0.0
        weights /= weights.sum()
        paces = {mode: table.pace(mode) for mode in self._modes}
        enter_stream_s = table.rtt_s + self.conditions.costs.shared_wait_s
        prospects = self._prospects(paces, weights, num_tokens, table.rtt_s, enter_stream_s)
        best = min(prospects, key=prospects.__getitem__)
        self.reason = "fastest"
        self.expected_ms = {mode: 1e3 * float(weights @ own.token_s) for mode, own in paces.items()}
        if best is not self.current:
            self.num_changes += self._num_observed > 0
            self.current, self._changed_at = best, self._num_observed

    def _prospects(
        self,
        paces: Mapping[ExecutionMode, _Pace],
        weights: NDArray[np.float64],
        num_tokens: int,
        rtt_s: float,
        enter_stream_s: float,
    ) -> dict[ExecutionMode, float]:
        """Returns by mode the expected seconds for `num_tokens`. A stream begins after `enter_stream_s`; one that is
        left continues for a round trip, at its own pace. `weights` are those of `ALPHAS`."""
        soon = min(SETTINGS.decision_interval_tokens, num_tokens)
        later = num_tokens - soon
        rounds_s = np.minimum.reduce([pace.token_s for mode, pace in paces.items() if mode is not _STREAM])
        enter_s = {mode: enter_stream_s if mode is _STREAM else pace.start_s for mode, pace in paces.items()}
        leave_s: dict[ExecutionMode, Any] = dict.fromkeys(paces, 0.0)
        self._round_probability = 1.0
        if _STREAM in paces:
            stream_s = paces[_STREAM].token_s
            self._round_probability = float(weights @ (rounds_s < stream_s))
            if stream_s[0]:
                leave_s[_STREAM] = rtt_s * np.maximum(0.0, 1.0 - rounds_s / stream_s)
        before = self.current if self._num_observed else None
        seconds = {}
        for mode, pace in paces.items():
            taken_s = soon * (1 + self._wanted_gain_share(mode)) * pace.token_s
            if mode is not before:
                taken_s = taken_s + enter_s[mode] + (0.0 if before is None else leave_s[before])
            if later:
                rests = [
                    later * then.token_s + (enter_s[other] + leave_s[mode] if other is not mode else 0.0)
                    for other, then in paces.items()
                ]
                taken_s = taken_s + np.minimum.reduce(rests)
            seconds[mode] = float(weights @ taken_s)
        return seconds

    def _wanted_gain_share(self, mode: ExecutionMode) -> float:
        """Returns by how much the mode must be better to be taken up: much in the middle of a text where others share
        the verifier. With some sessions in one mode and some in another all are slower, and each sees it as a reason
        to change."""
        is_shared = self.conditions.costs.is_shared
        if not self._num_observed:
            first = SETTINGS.shared_first_gain_share if is_shared else SETTINGS.first_gain_share
            return 0.0 if mode is _STREAM else first
        if mode is self.current:
            return 0.0
        return SETTINGS.shared_gain_share if is_shared else SETTINGS.min_gain_share

    def _current_table(self, models: ModelCosts, link: LinkCosts) -> _TimeTable:
        """Returns the table of times, a new one only after a cost changed noticeably."""
        self._keeps_pace = models.draft_token_s < SETTINGS.max_probe_share * models.target_token_s
        length = None if self._has_best_length else max(1, round(self._mean_length))
        trees = None
        if self._has_trees:
            known = self.conditions.costs
            trees = tree_costs(models, link, known.tree_draft_line(), known.stated_token_s)
        tree_yield = self.conditions.tree_yield
        ratios = self.conditions.time_ratios
        table = _TimeTable(models, link, length, self.conditions.branch_hit_share, ratios, trees, tree_yield)
        if self._table is None or not table.is_near(self._table):
            self._table = table
        return self._table

    # ------------------------------------------------------------------------------------------- window

    @property
    def window(self) -> int:
        """Returns the rounds to have in flight: as many as fit into a round trip and a verification."""
        if self.current is not ExecutionMode.PIPELINED:
            return 1
        if not self.conditions.are_known or not self._mean_length:
            return 2
        models, link = self.conditions.estimate()
        wanted = num_in_flight(max(1, round(self._mean_length)), models, link)
        return min(max(2, wanted), SETTINGS.max_in_flight)


class _TimeTable:
    """The pace of every mode, by one set of costs; each is computed when it is asked for. `length` is what rounds
    draft; None: what is best. `trees` are the costs of a tree, where one round at a time may be one."""

    def __init__(
        self,
        models: ModelCosts,
        link: LinkCosts,
        length: int | None,
        branch_hit_share: float,
        ratios: Mapping[ExecutionMode, float],
        trees: TreeCosts | None,
        tree_yield: float,
    ) -> None:
        self._models, self._link, self._trees, self._tree_yield = models, link, trees, tree_yield
        self._length, self._branch_hit_share = length, branch_hit_share
        self._ratios = ratios
        fixed_s = models.draft_fixed_s + models.verify_fixed_s
        times = (models.draft_token_s, models.target_token_s, fixed_s, models.verify_token_s, link.rtt_s)
        self._costs = (
            *times,
            float(length or 0),
            1.0 - branch_hit_share,
            *ratios.values(),
            trees.node_s if trees else 0.0,
            tree_yield,
        )
        self._known: dict[ExecutionMode, _Pace] = {}

    def is_near(self, other: _TimeTable) -> bool:
        """Returns whether its costs are nearly those of the other."""
        tolerance = SETTINGS.cost_tolerance_share
        return all(abs(a - b) <= tolerance * b for a, b in zip(self._costs, other._costs, strict=True))

    @property
    def rtt_s(self) -> float:
        """Returns the round trip that it is made for."""
        return self._link.rtt_s

    def pace(self, mode: ExecutionMode) -> _Pace:
        """Returns what the mode takes."""
        if (known := self._known.get(mode)) is None:
            known = self._known[mode] = self._stream() if mode is _STREAM else self._rounds(mode)
        return known

    def _stream(self) -> _Pace:
        token_s = cloud_only_s(self._models, self._link)
        return _Pace(np.full(len(ALPHAS), token_s), np.zeros(len(ALPHAS)))

    def _rounds(self, mode: ExecutionMode) -> _Pace:
        """Returns what rounds take, at each rate with the length that is best there."""
        times, ratio = self._times, self._ratios[mode]
        if mode is ExecutionMode.PIPELINED:
            table = pace_tables.branching_token_s(ALPHAS, times, self._branch_hit_share)
            starts = [pipelined_start_s(1.0, each) for each in times]
        else:
            table = pace_tables.rounds_token_s(ALPHAS, times)
            starts = [rounds_start_s(1.0, each.first_s) for each in times]
        best = table.argmin(axis=1)
        token_s = ratio * table[np.arange(len(ALPHAS)), best]
        start_s = ratio * np.array(starts)[best] * ALPHAS  # in proportion to the rate
        if self._trees is not None and mode is ExecutionMode.SPECULATIVE:
            tree_s = pace_tables.tree_token_s(ALPHAS, self._trees, DEFAULT_NODES) / self._tree_yield
            token_s = np.minimum(token_s, (1 + SETTINGS.min_tree_gain_share) * tree_s)
        return _Pace(token_s, start_s)

    @cached_property
    def _times(self) -> list[PipelinedTimes]:
        """Returns those of each length that rounds may have."""
        lengths = SETTINGS.lengths_tried if self._length is None else (self._length,)
        most = None if self._length is None else SETTINGS.max_in_flight
        return [pipelined_times(length, self._models, self._link, most) for length in lengths]
