"""Drafts one sequence by the rows of a model: chains, trees and supports, whatever computes the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

from outrider.common.errors import InvalidFieldError
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.types import DRAFT_SOURCE, Draft, RunnerUp, Signals, Support, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, Stop
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler, Sampled
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import (
    Continuations,
    Expander,
    Growing,
    Told,
    TreeBudget,
    TreeDraft,
    grow_by,
)


class SampledText:
    """Holds the committed ids of a sequence, and samples what is drafted after them from rows of scores."""

    def __init__(
        self, sampler: DraftSampler, num_tokens: int, max_context: int, num_prompt_tokens: int | None
    ) -> None:
        """`num_prompt_tokens` None: all ids of the first `commit` are the prompt."""
        self._sampler = sampler
        self._num_tokens, self._max_context = num_tokens, max_context
        self._num_prompt_tokens = num_prompt_tokens
        self._text: list[int] = []

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return len(self._text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids. Raises `InvalidFieldError` for one that does not exist."""
        for token_id in token_ids:
            if not 0 <= token_id < self._num_tokens:
                raise InvalidFieldError(
                    "token_ids", f"{token_id} is not below the draft's {self._num_tokens} tokens"
                )
        self._text.extend(token_ids)
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = len(self._text)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens."""
        assert 0 <= position <= len(self._text), f"cannot truncate {len(self._text)} tokens to {position}"
        del self._text[position:]

    def begin_chain(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Chain | None:
        """Returns a chain of up to `num_draft_tokens` tokens to be drafted; None where the context has no room."""
        assert self._text, "a draft needs at least one committed token"
        self._sampler.begin_draft()
        room = min(num_draft_tokens, self._max_context - len(self._text))
        return Chain(self._sampler, self._sample, room, should_stop) if room > 0 else None

    def begin_tree(
        self,
        budget: TreeBudget,
        values: NodeValues,
        rule: NodeRule | None = None,
        copies: Sequence[Expander[Continuations]] = (),
    ) -> tuple[Growing[Any], TellsOfRows[Any]] | None:
        """Returns a tree that grows by one source, which tells by rows; None where the context has no room. The
        likeliest path is what a chain would be, and with supports all children are drawn."""
        self._sampler.begin_draft()
        room = self._max_context - len(self._text)
        if room <= 0:
            return None
        copied = min(budget.max_copied_depth, room)
        budget = replace(budget, max_depth=min(budget.max_depth, room), max_copied_depth=copied)
        if self._sampler.has_supports:
            assert rule is None and not copies, "drawn trees have no signals and no copies"
            draw = self._sampler.make_draw(len(self._text))
            return DrawnTreeBuilder(draw, values.draws, budget).grow(), TellsOfRows(self._support, None)
        tell = partial(self.tell, has_signals=rule is not None)
        nothing = Continuations((), (), DRAFT_SOURCE)
        return TreeBuilder(values, budget, rule, copies).grow(), TellsOfRows(tell, nothing)

    def tell(self, rows: Rows, path: TokenIds, has_signals: bool = False) -> Continuations:
        """Returns what may follow a path, by the row after it, and on request the signals of each."""
        history = self._history(path)
        return self._sampler.continuations(
            rows, len(self._text), len(path), *history, has_signals=has_signals
        )

    def _support(self, rows: Rows, path: TokenIds) -> Support:
        return self._sampler.support(rows, *self._history(path))

    def _sample(self, rows: Rows, drafted: Sequence[int]) -> Sampled:
        return self._sampler.sample(rows, len(self._text), len(drafted), *self._history(drafted))

    def _history(self, drafted: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Returns prompt and output before the token after `drafted`, where sampling needs them."""
        if not self._sampler.needs_history:
            return (), ()
        num_prompt = self._num_prompt_tokens or 0
        return self._text[:num_prompt], [*self._text[num_prompt:], *drafted]


class Chain:
    """Is a chain under way: each token is sampled from the row after those before it."""

    def __init__(
        self,
        sampler: DraftSampler,
        sample: Callable[[Rows, Sequence[int]], Sampled],
        num_tokens: int,
        should_stop: ShouldStop | None,
    ) -> None:
        self.token_ids: list[int] = []
        self._sampler, self._sample = sampler, sample
        self._num_tokens, self._should_stop = num_tokens, should_stop
        self._probs: list[float] = []
        self._signals: list[Signals] = []
        self._supports: list[Support] = []
        self._runner_ups: list[RunnerUp] = []
        self._doubted: Signals | None = None

    def add(self, rows: Rows) -> bool:
        """Samples the next token; returns whether there is to be one after it. There is none where the grammar takes
        too much here."""
        try:
            token_id, prob, signal, support = self._sample(rows, self.token_ids)
        except GrammarLimitError:
            return False
        asked = self._should_stop
        stop = Stop.NO if asked is None else asked(token_id, signal, len(self.token_ids) + 1)
        if stop is Stop.BEFORE:
            self._doubted = signal
            return False
        self.token_ids.append(token_id)
        self._probs.append(prob)
        self._signals.append(signal)
        if support is not None:
            self._supports.append(support)
        if self._sampler.runner_up is not None:
            self._runner_ups.append(self._sampler.runner_up)
        return stop is Stop.NO and len(self.token_ids) < self._num_tokens

    def draft(self) -> Draft:
        """Returns what was drafted."""
        ids, probs, signals = tuple(self.token_ids), tuple(self._probs), tuple(self._signals)
        return Draft(ids, probs, signals, tuple(self._supports), self._doubted, tuple(self._runner_ups))


class RowsSequence(SampledText, ABC):
    """Is a sequence whose rows a subclass computes."""

    @abstractmethod
    def _begin(self) -> Rows:
        """Returns the row after the committed tokens, for a chain."""

    @abstractmethod
    def _go_on(self, drafted: Sequence[int]) -> Rows:
        """Returns the row after the committed tokens and those of a chain, whose last was not fed before."""

    @abstractmethod
    def feed_root(self) -> Rows:
        """Returns the row after the committed tokens, for a tree."""

    @abstractmethod
    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """Feeds the last token of each path, as far as the context has room. Yields the row after each, which the
        next may overwrite, and the runs of the model that it took."""

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples up to `num_draft_tokens` tokens; see `DraftSequence.propose`."""
        chain = self.begin_chain(num_draft_tokens, should_stop)
        if chain is None:
            return Draft((), ())
        rows = self._begin()
        while chain.add(rows):
            rows = self._go_on(chain.token_ids)
        return chain.draft()

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. The likeliest path is what `propose` would sample."""
        return self._propose_tree(budget, values, rule)

    def propose_union(
        self, budget: TreeBudget, values: NodeValues, copies: Sequence[Expander[Continuations]]
    ) -> TreeDraft:
        """See `ProposesUnions.propose_union`."""
        return self._propose_tree(budget, values, None, copies)

    def _propose_tree(
        self,
        budget: TreeBudget,
        values: NodeValues,
        rule: NodeRule | None,
        copies: Sequence[Expander[Continuations]] = (),
    ) -> TreeDraft:
        begun = self.begin_tree(budget, values, rule, copies)
        if begun is None:
            return TreeDraft((), ())
        growing, tells = begun
        return grow_by(growing, [RowsExpander(self, tells)])


@dataclass(frozen=True, slots=True)
class TellsOfRows(Generic[Told]):
    """Tells by rows what may follow: `tell` makes it of the row after a path, all sampling parameters in it; `nothing`
    follows where the context has no room, or the grammar takes too much."""

    tell: Callable[[Rows, TokenIds], Told]
    nothing: Told

    def of(self, rows: Rows, path: TokenIds) -> Told:
        """Returns what may follow a path, by the row after it."""
        try:
            return self.tell(rows, path)
        except GrammarLimitError:
            return self.nothing


class RowsExpander(Generic[Told]):
    """Tells by a sequence's rows what may follow."""

    def __init__(self, sequence: RowsSequence, tells: TellsOfRows[Told]) -> None:
        self._sequence, self._tells = sequence, tells
        self.num_runs = 0

    def expand(self, paths: Sequence[TokenIds]) -> list[Told]:
        """See `Expander.expand`."""
        is_root = paths == [()]
        rows = [(self._sequence.feed_root(), 1)] if is_root else self._sequence.feed_paths(paths)
        told: list[Told] = []
        for path, (row, num_runs) in zip(paths, rows, strict=False):
            self.num_runs += num_runs
            told.append(self._tells.of(row, path))
        return told + [self._tells.nothing] * (len(paths) - len(told))
