"""Which branch a generation drafts on next: after all rounds in flight, or after a predicted correction too.

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
from outrider.edge_client.decode.rounds import Round, RoundsInFlight, after_all_of


class LinearSpeculation:
    """Drafts after all of the last round, as if every draft were accepted."""

    def __init__(self) -> None:
        self._exhausted: Round | None = None  # nothing can be drafted after it

    def best(self, rounds: RoundsInFlight, window: RoundWindow) -> Branch[Round] | None:
        """Returns the branch to draft on; None where enough rounds are in flight or no branch is likely
        enough."""
        if len(rounds) >= window.size or not rounds.last.request.pipelined or rounds.last is self._exhausted:
            return None
        return after_all_of(rounds.last)

    def close(self, branch: Branch[Round]) -> None:
        """Closes a branch on which nothing can be drafted."""
        self._exhausted = branch.host

    def sent(self, round_: Round) -> None:
        """Opens the branches of a round that was sent."""

    def judged(self, round_: Round, verdict: Verdict) -> None:
        """Learns from a verdict."""

    def first_token_rejected(self, round_: Round, token_id: int) -> None:
        """Learns from an invalidated round in place of whose first token the sequence has `token_id`."""

    def resolved(self, next_round: Round | None, rounds: Sequence[Round]) -> None:
        """Drops the branches of all but `rounds`, the first of which, `next_round`, will be judged."""


class BranchingSpeculation(LinearSpeculation):
    """Drafts on the likeliest branch, predicted corrections included."""

    def __init__(self) -> None:
        self._rates = BranchAcceptance()
        self._branches: BranchTree[Round] = BranchTree(self._rates)

    def best(self, rounds: RoundsInFlight, window: RoundWindow) -> Branch[Round] | None:
        if len(rounds) >= window.max_rounds:
            return None
        branch = self._branches.best(None if window.is_branching else _assumes_acceptance)
        return branch if branch is not None and branch.chance >= SETTINGS.min_branch_probability else None

    def close(self, branch: Branch[Round]) -> None:
        self._branches.close(branch)

    def sent(self, round_: Round) -> None:
        before, parent = None, round_.parent
        if parent is None:  # nothing else is in flight
            self._branches.retain(lambda host: False)
        else:
            self.close(parent)
            if parent.correction is None:
                before = (parent.host, parent.offset)
        if round_.request.pipelined:  # otherwise it reaches the end, or nearly
            draft = round_.draft
            self._branches.add(round_, len(draft.token_ids), round_.chance, draft.runner_ups, before)

    def judged(self, round_: Round, verdict: Verdict) -> None:
        if not round_.num_kept:  # kept tokens have no runner-ups
            self._rates.observe(round_.draft.runner_ups, verdict.accepted_len, verdict.correction)

    def first_token_rejected(self, round_: Round, token_id: int) -> None:
        self._rates.observe(round_.draft.runner_ups, 0, token_id)

    def resolved(self, next_round: Round | None, rounds: Sequence[Round]) -> None:
        kept = set(map(id, rounds))
        chance = next_round.chance if next_round is not None else 1.0
        self._branches.retain(lambda host: id(host) in kept, chance)
        for each in rounds:
            each.chance = min(1.0, each.chance / chance)


def _assumes_acceptance(branch: Branch[Round]) -> bool:
    return branch.correction is None and not branch.host.assumes_correction


def create_speculation(state: GenerationState) -> LinearSpeculation:
    """Returns branching speculation where corrections can be predicted and several rounds may be in flight."""
    drafter = state.proposer.drafter
    can_predict = state.window.may_branch and state.options.method is Method.COUPLED and drafter is not None
    if can_predict and drafter is not None and drafter.keep_runner_ups():
        return BranchingSpeculation()
    return LinearSpeculation()
