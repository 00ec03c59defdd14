"""Where one generation drafts on behind its rounds under way: on the main line alone, or behind guesses too.

Guesses are made with `coupled` alone, the one method whose noise the edge knows, and with a draft that tells
its tokens' runner-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.types import Method, Verdict
from outrider.edge_client.controller.acceptance import BranchAcceptance
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.decode.branch_tree import Branch, Branches
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.rounds import Round, RoundsInFlight, whole_of
from outrider.edge_client.decode.token_buffer import SessionText

LEAST_CHANCE = SETTINGS.min_branch_probability  # each round costs either side a message's handling


class MainLine:
    """Behind all of the last round, as if every draft stood. Nothing is to be learnt."""

    def __init__(self) -> None:
        self._end: Round | None = None  # nothing can be drafted behind it

    def best(self, rounds: RoundsInFlight, window: RoundWindow) -> Branch[Round] | None:
        if len(rounds) >= window.size or not rounds.last.request.pipelined or rounds.last is self._end:
            return None
        return whole_of(rounds.last)

    def take(self, branch: Branch[Round]) -> None:
        self._end = branch.host

    def grow(self, sent: Round) -> None: ...

    def observe(self, judged: Round, verdict: Verdict) -> None: ...

    def observe_first_wrong(self, stale: Round) -> None: ...

    def settle(self, heir: Round | None, rounds: Sequence[Round]) -> None: ...


class RoundBranches:
    """The branches that nothing was drafted behind yet."""

    def __init__(self, text: SessionText) -> None:
        self._rates = BranchAcceptance()
        self._text = text
        self._branches: Branches[Round] = Branches(self._rates)

    def best(self, rounds: RoundsInFlight, window: RoundWindow) -> Branch[Round] | None:
        """The likeliest one; None where enough is under way and where nothing is likely enough."""
        if len(rounds) >= window.max_rounds:
            return None
        branch = self._branches.best(None if window.is_branching else _is_sure)
        return branch if branch is not None and branch.chance >= LEAST_CHANCE else None

    def take(self, branch: Branch[Round]) -> None:
        """Something is drafted behind it, or can not be."""
        self._branches.take(branch)

    def grow(self, sent: Round) -> None:
        """The branches of a round that was just sent."""
        before = None
        if sent.behind is None:  # nothing else is under way
            self._branches.keep(lambda host: False)
        else:
            self.take(sent.behind)
            if sent.behind.guess is None:
                before = (sent.behind.host, sent.behind.place)
        if sent.request.pipelined:  # else what it holds ends the text, or nearly
            draft = sent.draft
            self._branches.grow(sent, len(draft.token_ids), sent.chance, draft.runner_ups, before)

    def observe(self, judged: Round, verdict: Verdict) -> None:
        """Learns from a round whose verdict was taken; where kept tokens came before the draft, nothing."""
        if not judged.num_kept:
            self._rates.observe(judged.draft.runner_ups, verdict.accepted_len, verdict.correction)

    def observe_first_wrong(self, stale: Round) -> None:
        """Learns from a round that fell by its first token, in whose place the text has another."""
        self._rates.observe(stale.draft.runner_ups, 0, self._text.chain.token_ids[stale.start])

    def settle(self, heir: Round | None, rounds: Sequence[Round]) -> None:
        """`rounds` are left under way, `heir` being the first of them, which will be judged."""
        kept = set(map(id, rounds))
        chance = heir.chance if heir is not None else 1.0
        self._branches.keep(lambda host: id(host) in kept, chance)
        for each in rounds:
            each.chance = min(1.0, each.chance / chance)


def _is_sure(branch: Branch[Round]) -> bool:
    return branch.guess is None and not branch.host.is_guess


def create_branches(decoding: Decoding) -> MainLine | RoundBranches:
    """The main line where nothing can be guessed, or only one round may be under way."""
    drafter = decoding.proposer.drafter
    if not decoding.window.may_branch or decoding.options.method is not Method.COUPLED or drafter is None:
        return MainLine()
    return RoundBranches(decoding.text) if drafter.keep_runner_ups() else MainLine()
