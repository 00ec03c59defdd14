"""Estimates a session's models, link and acceptance from its rounds, for the cost model. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.edge_client.controller.acceptance import AcceptanceEstimator
from outrider.edge_client.controller.cost_model import (
    Acceptance,
    LinkCosts,
    ModelCosts,
    round_s,
)
from outrider.edge_client.controller.cost_model_pipelined import branching_token_s, pipelined_times
from outrider.edge_client.controller.round_costs import RoundCosts, StepTimes
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.controller.time_ratio import TimeRatio
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord


class Conditions:
    """Holds the estimates as of the last observed round."""

    def __init__(
        self, branch_hit_share: float = 0.0, *, is_copied: bool = False, is_local: bool = False
    ) -> None:
        """`branch_hit_share` of rejections is expected to be anticipated by a speculative branch, before any
        was observed. `is_copied`: the draft has no model. `is_local`: the verifier runs on this machine."""
        weight = SETTINGS.branch_prior_weight_rejections
        self._num_rejections, self._num_hits = weight, weight * branch_hit_share
        self.costs = RoundCosts(is_local=is_local)
        self.acceptance = AcceptanceEstimator(is_copied)
        self.window = 1  # rounds that may be in flight now
        weight = SETTINGS.time_ratio_weight_rounds
        self._times = {
            ExecutionMode.SPECULATIVE: TimeRatio(1.0, weight),
            ExecutionMode.PIPELINED: TimeRatio(1.0 + SETTINGS.pipelined_excess_share, weight),
        }
        self._tree_tokens = self._expected_tree_tokens = SETTINGS.tree_yield_weight_tokens
        self._tree_times = TimeRatio(1.0, SETTINGS.tree_excess_weight_rounds)

    @property
    def are_known(self) -> bool:
        """Returns whether every part of the cost model was observed."""
        return self.costs.is_known

    def observe_opening(
        self,
        rtt_s: float,
        forward_s: float,
        draft_token_s: float | None,
        stated: StepTimes | None = None,
        num_active: int = 0,
        *,
        would_be_accepted: bool | None = None,
    ) -> None:
        """Adds an opening: the prompt's forward, a drafted token's time (None: it is known), what the verifier states
        of its steps, how many sessions are active there (0: it does not say), and whether the draft proposed the
        opening's own token (None: it was not asked)."""
        if would_be_accepted is not None:
            self.acceptance.posterior.observe(int(would_be_accepted), int(not would_be_accepted))
        self.costs.observe_rtt(rtt_s, is_alone=False)  # the draft read the prompt meanwhile
        if draft_token_s is not None:
            self.costs.observe_draft(draft_token_s, 1)
        self.costs.observe_opening(forward_s, stated, num_active)

    def observe_prompt(self, num_agreed: int, num_different: int) -> None:
        """Begins the acceptance rate from the prompt, before any token was judged: in so many of its places the draft
        proposed what the target would have written there, in so many it did not."""
        weight = SETTINGS.prompt_weight
        if num_agreed or num_different:
            self.acceptance.posterior.expect(weight * num_agreed, weight * num_different)

    def observe(self, *records: RoundRecord) -> None:
        """Adds rounds. An unanswered one has no times: only its first token, where that is known, counts."""
        for record in records:
            self.acceptance.observe(record)
            if record.window > 1:
                self._observe_branches(record)
            if record.is_answered:
                self.costs.observe(record)
        for record in records:  # by costs that are estimated once
            is_timed = record.is_answered and record.num_draft_tokens and record.main_path is None
            if is_timed and record.since_ms is not None:
                self._observe_time(record, record.since_ms / 1e3)

    def observe_stream(self, token_s: float, num_active: int = 0) -> None:
        """Adds the time between two tokens of the target's stream; see `RoundCosts.observe_target`."""
        self.costs.observe_target(token_s, num_active)
        for times in self._times.values():
            times.observe_other()

    def _observe_branches(self, record: RoundRecord) -> None:
        num_accepted, num_drafted = record.as_chain
        is_rejected = record.is_answered and num_accepted < num_drafted
        if is_rejected or record.is_first_wrong:
            self._num_rejections = SETTINGS.branch_memory_per_rejection * self._num_rejections + 1
            self._num_hits = SETTINGS.branch_memory_per_rejection * self._num_hits
        self._num_hits += record.is_guess_hit

    def _observe_time(self, record: RoundRecord, since_s: float) -> None:
        """Adds the time since the answer before, with the one expected of a round of this length: of one that was sent
        ahead what lies between two verdicts, of another one a whole round, which a branch shortens."""
        models, link = self.estimate()
        whole_s = expected_s = round_s(record.num_draft_tokens, models, link)
        if record.window > 1:
            parts = pipelined_times(record.num_draft_tokens, models, link)
            expected_s = whole_s + parts.rest_s
            if record.is_guess_hit:
                expected_s -= parts.spared_s
            elif record.pipelined_hit:
                expected_s = parts.period_s
        mode = ExecutionMode.PIPELINED if record.window > 1 else ExecutionMode.SPECULATIVE
        for each, times in self._times.items():
            if each is mode:
                times.observe(min(since_s, SETTINGS.longest_gap_rounds * whole_s), expected_s)
            else:
                times.observe_other()

    @property
    def time_ratios(self) -> Mapping[ExecutionMode, float]:
        """Returns the time that each way of rounds takes relative to the cost model's. Where both sides share
        processors, say, a draft slows the verification that it overlaps, which makes pipelined rounds longer. A
        stream's time is what the costs say: it is measured as a whole."""
        return {mode: times.value for mode, times in self._times.items()}

    @property
    def learned_time_ratios(self) -> Mapping[ExecutionMode, float]:
        """Returns the same of the modes that ran, for the next sequence's `start_from_time_ratios`; nothing where
        others share the verifier, as times depend on their modes too."""
        if self.costs.is_shared:
            return {}
        return {mode: times.value for mode, times in self._times.items() if times.has_observed}

    def start_from_time_ratios(self, ratios: Mapping[ExecutionMode, float]) -> None:
        """Begins with what the modes of earlier sequences took."""
        for mode, ratio in ratios.items():
            self._times[mode].start_from(ratio)

    def observe_tree(
        self, num_tokens: int, expected_tokens: float, seconds: float, expected_s: float
    ) -> None:
        """Adds what a tree brought and what its round took, each with what was expected."""
        memory = SETTINGS.acceptance_memory_per_round
        self._tree_tokens = memory * self._tree_tokens + num_tokens
        self._expected_tree_tokens = memory * self._expected_tree_tokens + expected_tokens
        self._tree_times.observe(seconds, expected_s)

    def observe_no_tree(self) -> None:
        """Notes a round that was no tree: what trees bring and take is forgotten slowly."""
        memory, weight = SETTINGS.acceptance_memory_per_round, SETTINGS.tree_yield_weight_tokens
        self._tree_tokens = memory * self._tree_tokens + (1 - memory) * weight
        self._expected_tree_tokens = memory * self._expected_tree_tokens + (1 - memory) * weight
        self._tree_times.observe_other()

    @property
    def tree_yield(self) -> float:
        """Returns the tokens a second that trees bring relative to those that the cost model expects."""
        return self._tree_tokens / self._expected_tree_tokens / self._tree_times.value

    @property
    def branch_hit_share(self) -> float:
        """Returns the share of rejections that a speculative branch anticipated."""
        return min(1.0, self._num_hits / self._num_rejections)

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        """Returns the costs; see `RoundCosts.estimate`."""
        return self.costs.estimate()

    def fastest_pipelined(self, acceptance: Acceptance, length: int) -> tuple[int, float]:
        """Returns the length of pipelined rounds with the fewest seconds a token, and those seconds.

        It descends from `length`, such as the last answer, which costs a tenth of looking at all lengths.
        """
        models, link = self.estimate()

        def token_s(tried: int) -> float:
            return branching_token_s(acceptance, pipelined_times(tried, models, link), self.branch_hit_share)

        best_s = token_s(length)
        for step in (4, -4, 1, -1):
            while 1 <= length + step <= MAX_DEPTH and (next_s := token_s(length + step)) < best_s:
                length, best_s = length + step, next_s
        return length, best_s
