"""Keeps the KV of sequences that have ended for later ones with the same beginning: the next turn of a
conversation.

A sequence that read a prefix at once and one that decoded it token by token differ in the last digits
(design.md §10), so a reused sequence may propose another token now and then. Only callers whose text the
target alone decides (method coupled) may use the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, Self, runtime_checkable

from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import (
    DraftModel,
    DraftSequence,
    Guess,
    KeepsRunnerUps,
    NodeRule,
    Prepares,
    ProposesAlong,
    ProposesTrees,
    ProposesUnions,
    ShouldStop,
    TakesGuesses,
)
from outrider.edge_client.drafting.copying.model import CopyModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import Continuations, Expander, TreeBudget, TreeDraft
from outrider.edge_client.drafting.union import UnionModel


@runtime_checkable
class RenewableSequence(DraftSequence, Protocol):
    """Allows its KV to be used for another text."""

    @property
    def cached_token_ids(self) -> Sequence[int]:
        """Returns the ids whose KV is in the buffers."""

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the buffers in bytes."""

    def rest(self) -> None:
        """Ends the text and frees all but its KV, until `renew`."""

    def renew(self, sampling: SamplingParams, num_prompt_tokens: int | None, num_support: int) -> None:
        """Begins another text under other parameters, after `rest`; KV of their common prefix is reused."""


class SequencePool:
    """Holds idle sequences of one model with at most `max_bytes` of KV; the least recently used are evicted.

    Thread-safe. Sequences that cannot be renewed are closed instead.
    """

    def __init__(self, model: DraftModel, max_bytes: int) -> None:
        self.model = model
        self._max_bytes = max_bytes
        self._idle: list[RenewableSequence] = []  # least recently used first
        self._lock = threading.Lock()

    def lease(self) -> DraftLease:
        """Returns the model for one session, whose sequence comes from the pool and returns to it."""
        return DraftLease(self)

    def take(self, token_ids: Sequence[int]) -> tuple[RenewableSequence | None, int]:
        """Returns the idle sequence with the longest common prefix, and that prefix's length. Returns None
        where each would lose more tokens than are reused, since its own conversation may go on."""
        with self._lock:
            found = [(common_prefix(each.cached_token_ids, token_ids), each) for each in self._idle]
            worth = [(n, each) for n, each in found if n and 2 * n >= len(each.cached_token_ids)]
            if not worth:
                return None, 0
            num_common, best = max(worth, key=lambda pair: pair[0])
            self._idle.remove(best)
        return best, num_common

    def give_back(self, sequence: DraftSequence) -> None:
        """Adds a sequence, and evicts the least recently used ones beyond `max_bytes`."""
        if not isinstance(sequence, RenewableSequence):
            sequence.close()
            return
        sequence.rest()
        dropped: list[RenewableSequence] = []
        with self._lock:
            self._idle.append(sequence)
            while self._idle and sum(each.num_kv_bytes for each in self._idle) > self._max_bytes:
                dropped.append(self._idle.pop(0))
        for each in dropped:
            each.close()

    @property
    def num_idle(self) -> int:
        """Returns how many sequences are idle."""
        return len(self._idle)

    @property
    def num_idle_bytes(self) -> int:
        """Returns the KV of idle sequences in bytes."""
        with self._lock:
            return sum(each.num_kv_bytes for each in self._idle)

    def close(self) -> None:
        """Frees all idle sequences."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def check_integrity(self) -> None:
        """Asserts that no sequence is idle twice and the bound is kept."""
        with self._lock:
            assert len({id(each) for each in self._idle}) == len(self._idle), "a sequence is idle twice"
            assert sum(each.num_kv_bytes for each in self._idle) <= self._max_bytes, "too much is kept"


def create_pool(draft: DraftModel | None, max_bytes: int) -> SequencePool | None:
    """Returns a pool for the KV of a draft's model; None where it has none, or is a copy, which has no KV."""
    model = draft.innermost if isinstance(draft, UnionModel) else draft
    return None if model is None or isinstance(model, CopyModel) else SequencePool(model, max_bytes)


def with_lease(draft: DraftModel | None, lease: DraftLease) -> DraftModel:
    """Returns a draft whose model is the pool's; what copies beside it, and remembers texts, stays."""
    return draft.with_innermost(lease) if isinstance(draft, UnionModel) else lease


class DraftLease:
    """Lends the pool's model to one session as a `DraftModel`. `num_reused_tokens` counts the prompt's tokens
    whose KV was reused."""

    def __init__(self, pool: SequencePool) -> None:
        self.pool = pool
        self.num_reused_tokens = 0
        model = pool.model
        self.num_tokens, self.max_context = model.num_tokens, model.max_context
        self.eos_token_ids, self.signal_names = model.eos_token_ids, model.signal_names
        self.fingerprint, self.tokenizer_fingerprint = model.fingerprint, model.tokenizer_fingerprint

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> DraftSequence:
        """Returns a sequence that is taken from the pool at its first commit."""
        return _LeasedSequence(self, sampling, num_prompt_tokens, num_support)

    def close(self) -> None:
        """Does nothing: the weights belong to the pool."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _LeasedSequence:
    """Becomes a sequence of the pool, or a new one, when its first text is committed."""

    def __init__(
        self, lease: DraftLease, sampling: SamplingParams, num_prompt_tokens: int | None, num_support: int
    ) -> None:
        self._lease = lease
        self._sampling, self._num_support = sampling, num_support
        self._num_prompt_tokens = num_prompt_tokens
        self._keeps_runner_ups = False
        self._guess: Guess | None = None
        self._sequence: DraftSequence | None = None

    @property
    def position(self) -> int:
        return self._sequence.position if self._sequence else 0

    def commit(self, token_ids: Sequence[int]) -> None:
        if self._sequence is None:
            self._sequence = self._begin(token_ids)
            self.keep_runner_ups(self._keeps_runner_ups)
            if self._guess is not None and isinstance(self._sequence, TakesGuesses):
                self._sequence.guess_by(self._guess)
        self._sequence.commit(token_ids)

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        self._keeps_runner_ups = is_wanted
        if isinstance(self._sequence, KeepsRunnerUps):
            self._sequence.keep_runner_ups(is_wanted)

    def guess_by(self, guess: Guess) -> None:
        self._guess = guess

    def prepare(self, num_tokens: int) -> Iterator[None]:
        return self._sequence.prepare(num_tokens) if isinstance(self._sequence, Prepares) else iter(())

    def truncate(self, position: int) -> None:
        if self._sequence is not None:
            self._sequence.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        assert self._sequence is not None, "a draft needs at least one committed token"
        return self._sequence.propose(num_draft_tokens, should_stop)

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        if isinstance(self._sequence, ProposesAlong):
            return self._sequence.propose_along(token_ids)
        self.commit(token_ids)
        return ()

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        assert isinstance(self._sequence, ProposesTrees), "a draft needs at least one committed token"
        return self._sequence.propose_tree(budget, values, rule)

    def propose_union(
        self, budget: TreeBudget, values: NodeValues, copies: Sequence[Expander[Continuations]]
    ) -> TreeDraft:
        assert isinstance(self._sequence, ProposesUnions), "a draft needs at least one committed token"
        return self._sequence.propose_union(budget, values, copies)

    def close(self) -> None:
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            self._lease.pool.give_back(sequence)

    def check_integrity(self) -> None:
        if self._sequence is not None:
            self._sequence.check_integrity()

    def _begin(self, token_ids: Sequence[int]) -> DraftSequence:
        idle, num_common = self._lease.pool.take(token_ids)
        if idle is None:
            return self._lease.pool.model.sequence(
                self._sampling, num_prompt_tokens=self._num_prompt_tokens, num_support=self._num_support
            )
        idle.renew(self._sampling, self._num_prompt_tokens, self._num_support)
        # What the target alone wrote before the first draft is no part of the prompt.
        most = num_common if self._num_prompt_tokens is None else self._num_prompt_tokens
        self._lease.num_reused_tokens = min(num_common, most)
        return idle
