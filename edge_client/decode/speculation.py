"""Chooses the branch to draft on next: after all rounds in flight, or after a predicted correction.

Corrections are predicted with `coupled` alone, the one method whose noise the edge knows, and with a draft
that reports its tokens' runner-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.types import Method, Verdict
from outrider.edge_client.controller.acceptance import BranchAcceptance
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.decode.branch_tree import Branch, BranchTree
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.rounds import Round


class Speculation:
    """Keeps the branches of the rounds in flight. Without runner-ups (`predicts_corrections`) only those on
    which every draft is accepted are opened, and there is nothing to learn."""

    def __init__(self, predicts_corrections: bool) -> None:
        self._predicts_corrections = predicts_corrections
        self._rates = BranchAcceptance()
        self._branches: BranchTree[Round] = BranchTree(self._rates)

    def best(self, num_in_flight: int, window: RoundWindow) -> Branch[Round] | None:
        """Returns the branch to draft on; None where enough rounds are in flight or no branch is likely
        enough."""
        if num_in_flight >= (window.max_rounds if self._predicts_corrections else window.size):
            return None
        branch = self._branches.best(None if window.is_branching else _assumes_acceptance)
        return branch if branch is not None and branch.chance >= SETTINGS.min_branch_probability else None

    def close(self, branch: Branch[Round]) -> None:
        """Closes a branch that a round was drafted on, or on which none can be."""
        self._branches.close(branch)

    def sent(self, round_: Round) -> None:
        """Opens the branches of a round that was sent."""
        before, parent = None, round_.parent
        if parent is None:  # nothing else is in flight
            self._branches.clear()
        else:
            self.close(parent)
            if parent.correction is None:
                before = (parent.host, parent.offset)
        if round_.request.pipelined:  # otherwise it reaches the end, or nearly
            runner_ups = round_.draft.runner_ups if self._predicts_corrections else ()
            length = len(round_.request.draft_tokens)
            self._branches.add(round_, length, round_.chance, runner_ups, before)

    def judged(self, round_: Round, verdict: Verdict) -> None:
        """Learns from a verdict. Kept tokens have no runner-ups."""
        if not round_.num_kept:
            self._rates.observe(round_.draft.runner_ups, verdict.accepted_len, verdict.correction)

    def first_token_rejected(self, round_: Round, token_id: int) -> None:
        """Learns from an invalidated round in place of whose first token the sequence has `token_id`."""
        self._rates.observe(round_.draft.runner_ups, 0, token_id)

    def resolved(self, next_round: Round | None, rounds: Sequence[Round]) -> None:
        """Drops the branches of all but `rounds`, the first of which, `next_round`, will be judged."""
        kept = set(map(id, rounds))
        chance = next_round.chance if next_round is not None else 1.0
        self._branches.retain(lambda host: id(host) in kept, chance)
        for each in rounds:
            each.chance = min(1.0, each.chance / chance)


def _assumes_acceptance(branch: Branch[Round]) -> bool:
    return branch.correction is None and not branch.host.assumes_correction


def create_speculation(state: GenerationState) -> Speculation:
    """Creates it, with predicted corrections where several rounds may be in flight and they are possible."""
    drafter = state.proposer.drafter
    may_predict = state.window.may_branch and state.options.method is Method.COUPLED
    return Speculation(may_predict and drafter is not None and drafter.keep_runner_ups())
