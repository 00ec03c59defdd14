"""Drafts with a model and with what copies, together: `--draft-strategy model+suffix`.

A tree holds what any of them told, each valued by what its source was worth so far; copies cost no run of the model. A
chain is the copy where it is expected to bring as many tokens as the model's, else the model's (SuffixDecoding's
hybrid, 2411.04975, §3.3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Self

from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import (
    DraftModel,
    DraftSequence,
    KeepsRunnerUps,
    NodeRule,
    Prepares,
    ProposesAlong,
    ProposesUnions,
    ServesOwners,
    ShouldStop,
    runtime_of,
)
from outrider.edge_client.drafting.copying.model import CopyModel
from outrider.edge_client.drafting.copying.sequence import CopySequence
from outrider.edge_client.drafting.node_values import CHAIN_SOURCE, NodeValues
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft

# Tokens of a run from which on a copy is a node beside a model's; chosen of 3, 5, 7 and 9 on prompts that
# `make bench-sources` leaves out. After a run of four a copy is right one time in 15 where the model expects another
# token.
_MIN_MATCH = 7
_DRAFTED = Continuations((0,), (0.0,), CHAIN_SOURCE)  # a token of the model's chain, whatever it is


class UnionModel:
    """Implements `DraftModel` by a model and one or several that copy."""

    def __init__(self, model: DraftModel, copies: Sequence[CopyModel]) -> None:
        self.model, self.copies = model, tuple(copies)
        self.num_tokens, self.max_context = model.num_tokens, model.max_context
        self.eos_token_ids = model.eos_token_ids
        self.tokenizer_fingerprint = model.tokenizer_fingerprint

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Returns none: a copy has no signals."""
        return ()

    @property
    def fingerprint(self) -> str:
        """Returns a SHA-256 over those of its parts."""
        parts = (self.model.fingerprint, *(each.fingerprint for each in self.copies))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def runtime(self) -> str:
        """Returns the model's, and what copies beside it."""
        names = ", ".join(each.rules.name for each in self.copies)
        return f"{runtime_of(self.model) or 'a draft model'}, with copies ({names})"

    @property
    def innermost(self) -> DraftModel:
        """Returns the model that has weights."""
        return self.model.innermost if isinstance(self.model, UnionModel) else self.model

    def with_innermost(self, model: DraftModel) -> UnionModel:
        """Returns the same union with that model in another form: of a pool, for example."""
        if isinstance(self.model, UnionModel):
            model = self.model.with_innermost(model)
        return type(self)(model, self.copies)

    def of_owner(self, owner: str) -> UnionModel:
        """See `ServesOwners.of_owner`."""
        model = self.model.of_owner(owner) if isinstance(self.model, ServesOwners) else self.model
        return type(self)(model, [each.of_owner(owner) for each in self.copies])

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> UnionSequence:
        """Returns an empty sequence."""
        model = self.model.sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)
        copies = [each.sequence(sampling, num_support=num_support) for each in self.copies]
        return UnionSequence(model, copies, has_supports=num_support > 0)

    def close(self) -> None:
        """Releases all parts."""
        for each in (self.model, *self.copies):
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class UnionSequence:
    """Keeps one text in all parts."""

    def __init__(self, model: DraftSequence, copies: Sequence[CopySequence], has_supports: bool) -> None:
        self._model, self._copies = model, copies
        self._has_supports = has_supports
        self._values = NodeValues()

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return self._model.position

    def use_values(self, values: NodeValues) -> None:
        """See `UsesValues.use_values`."""
        self._values = values
        for each in self._copies:
            each.use_values(values)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids. Raises `InvalidFieldError`."""
        for each in (self._model, *self._copies):
            each.commit(token_ids)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens."""
        for each in (self._model, *self._copies):
            each.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Returns a copy, or the model's draft; a single token is always the model's."""
        if num_draft_tokens > 1:
            best = max(self._copies, key=lambda each: each.copy(num_draft_tokens)[1])
            if best.copy(num_draft_tokens)[1] >= self._expected(num_draft_tokens):
                return best.propose(num_draft_tokens, should_stop)
        return _observed(self._model.propose(num_draft_tokens, should_stop))

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        """See `ProposesAlong.propose_along`: what the model would have drafted."""
        if not isinstance(self._model, ProposesAlong):
            self.commit(token_ids)
            return ()
        for each in self._copies:
            each.commit(token_ids)
        return self._model.propose_along(token_ids)

    def write_alone(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """See `WritesAlone.write_alone`: only the model writes."""
        return self._model.propose(num_draft_tokens, should_stop)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. With supports it is the model's alone: of what is drawn the whole
        distribution must be known."""
        assert rule is None, "a rule needs signals"
        assert isinstance(self._model, ProposesUnions), "the model takes no copies into its trees"
        if self._has_supports:
            return self._model.propose_tree(budget, values)
        return self._model.propose_union(
            budget, values, [each.expander(min_match=_MIN_MATCH) for each in self._copies]
        )

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        """Fills `Draft.runner_ups` of the model's drafts from now on, or no longer."""
        if isinstance(self._model, KeepsRunnerUps):
            self._model.keep_runner_ups(is_wanted)

    def prepare(self, num_tokens: int) -> Iterator[None]:
        """See `Prepares.prepare`."""
        return self._model.prepare(num_tokens) if isinstance(self._model, Prepares) else iter(())

    def remember(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """See `Remembers.remember`."""
        for each in self._copies:
            each.remember(token_ids, num_prompt_tokens)

    def close(self) -> None:
        """Frees all parts."""
        for each in (self._model, *self._copies):
            each.close()

    def check_integrity(self) -> None:
        """Asserts that all parts have the same text and are consistent."""
        for each in (self._model, *self._copies):
            each.check_integrity()
            assert each.position == self._model.position, "parts have different texts"

    def _expected(self, num_draft_tokens: int) -> float:
        """Returns how many tokens of the model's chain are expected to be accepted, as chains were so far."""
        (chance,) = self._values.chances(_DRAFTED)
        return sum(chance**number for number in range(1, num_draft_tokens + 1))


def _observed(draft: Draft) -> TreeDraft:
    """Returns a model's chain as one that `NodeValues` learns from."""
    told = ((Continuations((token_id,), (0.0,), CHAIN_SOURCE),) for token_id in draft.token_ids)
    own = {each.name: getattr(draft, each.name) for each in fields(Draft)}
    num_runs = draft.num_runs if isinstance(draft, TreeDraft) else len(draft.token_ids)
    return TreeDraft(**own, continuations=(*told, ()), num_runs=num_runs)
