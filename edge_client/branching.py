"""The branches of one generation's rounds under way: which may be drafted behind, and which is worth it.

Guesses are made with `coupled` alone, the one method whose noise the edge knows, and with a draft that tells
its tokens' runner-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.types import Method, Verdict
from edge_client.guesses import Branch, Branches, GuessRates
from edge_client.options import Decoding
from edge_client.pipeline import RoundWindow
from edge_client.rounds import Round
from edge_client.text import SessionText

LEAST_CHANCE = 0.05  # to be judged: each round costs either side a message's handling


class RoundBranches:
    """Those that nothing was drafted behind yet."""

    def __init__(self, text: SessionText) -> None:
        self.rates = GuessRates()
        self._text = text
        self._branches: Branches[Round] = Branches(self.rates)

    def best(self, num_under_way: int, window: RoundWindow) -> Branch[Round] | None:
        """The likeliest one; None where enough is under way and where nothing is likely enough."""
        if num_under_way >= window.most:
            return None
        branch = self._branches.best(None if window.has_guesses else _is_sure)
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
            self.rates.observe(judged.draft.runner_ups, verdict.accepted_len, verdict.correction)

    def settle(self, heir: Round | None, rounds: Sequence[Round]) -> None:
        """`rounds` are left under way, `heir` being the first of them, which will be judged."""
        kept = set(map(id, rounds))
        chance = heir.chance if heir is not None else 1.0
        self._branches.keep(lambda host: id(host) in kept, chance)
        for each in rounds:
            each.chance = min(1.0, each.chance / chance)


def _is_sure(branch: Branch[Round]) -> bool:
    return branch.guess is None and not branch.host.is_guess


def create_branches(decoding: Decoding) -> RoundBranches | None:
    """None where nothing can be guessed, or only one round may be under way."""
    drafter = decoding.drafter
    if not decoding.window.may_guess or decoding.options.method is not Method.COUPLED or drafter is None:
        return None
    return RoundBranches(decoding.text) if drafter.keep_runner_ups() else None
