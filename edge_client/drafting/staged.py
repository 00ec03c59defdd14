"""Drafts for the draft: `--draft-strategy staged`.

Spector and Re 2023, "Accelerating LLM Inference with Staged Speculative Decoding" (2308.04623). A suffix index guesses
what the draft model is about to draft; one run of the model computes the next token and, beside it, those after the
guesses. With the same noise it samples what it would have sampled one run at a time: the same chain, in fewer runs, but
for what rounding does to rows of one run (docs/sources.md).
Trees are drafted as without: their runs have several rows already.
"""

from __future__ import annotations

from dataclasses import fields

from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import (
    DraftSequence,
    NodeRule,
    ProposesTrees,
    ProposesUnions,
    ShouldStop,
    TakesGuesses,
)
from outrider.edge_client.drafting.copying.sequence import CopySequence
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import Continuations, Expander, TreeBudget, TreeDraft
from outrider.edge_client.drafting.union import UnionModel, UnionSequence

# A guess is fed while the chance that it is reached is above this: a further row of a run takes about so large a share
# of a run of one row (`make bench-sources`).
_MIN_CHANCE = 0.4


class StagedModel(UnionModel):
    """Is a model that drafts what it would draft alone; its one copy guesses for it."""

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Returns the model's: it computed every token."""
        return self.model.signal_names

    @property
    def fingerprint(self) -> str:
        """Returns the model's: the draft is the same."""
        return self.model.fingerprint

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> StagedSequence:
        """Returns an empty sequence."""
        model = self.model.sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)
        (copy,) = self.copies
        return StagedSequence(model, copy.sequence(sampling))


class StagedSequence(UnionSequence):
    """Keeps one text in the model's sequence and in the index that guesses."""

    def __init__(self, model: DraftSequence, copy: CopySequence) -> None:
        super().__init__(model, [copy], has_supports=False)
        self._copy = copy
        self._guesses: list[tuple[int, TreeDraft]] = []  # of the chain under way: tokens before each, and it
        self._own_values = NodeValues()  # what guesses are worth to the draft, not to the target
        copy.use_values(self._own_values)
        if isinstance(model, TakesGuesses):
            model.guess_by(self._guess)

    def use_values(self, values: NodeValues) -> None:
        """Does nothing: guesses are judged by the draft."""

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> TreeDraft:
        """Returns the model's draft, with the number of runs that it took."""
        self._guesses = []
        draft = self._model.propose(num_draft_tokens, should_stop)
        num_spared = 0
        for start, guessed in self._guesses:
            drafted = draft.token_ids[start:]
            num_right = common_prefix(guessed.token_ids, drafted)
            self._own_values.observe(
                guessed, range(num_right), drafted[num_right] if num_right < len(drafted) else None
            )
            num_spared += min(num_right, max(0, len(drafted) - 1))
        own = {each.name: getattr(draft, each.name) for each in fields(Draft)}
        num_drafted = len(draft.token_ids)
        nothing: tuple[tuple[Continuations, ...], ...] = ((),) * (num_drafted + 1)  # is learned from
        return TreeDraft(**own, num_runs=num_drafted - num_spared, continuations=nothing)

    def write_alone(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """See `WritesAlone.write_alone`: the same."""
        return self.propose(num_draft_tokens, should_stop)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`."""
        assert isinstance(self._model, ProposesTrees), "the model proposes no trees"
        return self._model.propose_tree(budget, values, rule)

    def propose_union(
        self, budget: TreeBudget, values: NodeValues, copies: list[Expander[Continuations]]
    ) -> TreeDraft:
        """See `ProposesUnions.propose_union`."""
        assert isinstance(self._model, ProposesUnions), "the model takes no copies into its trees"
        return self._model.propose_union(budget, values, copies)

    def _guess(self, drafted: TokenIds, room: int) -> TokenIds:
        guessed, _ = self._copy.copy(room, drafted, _MIN_CHANCE)
        if guessed.token_ids:
            self._guesses.append((len(drafted), guessed))
        return guessed.token_ids
