"""Drafts one sequence with the INT4 draft: its committed ids, and the ids whose KV is in the buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.common.errors import InvalidFieldError
from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, RunnerUp, SamplingParams, Signals, Support, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, Stop
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.noise_ahead import MAX_AHEAD_BYTES, NOISE_BYTES
from outrider.edge_client.drafting.onnx.bindings import Rows
from outrider.edge_client.drafting.onnx.dropout import DropoutPlan
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.onnx.sampler import DraftSampler, Sampled, signals_of
from outrider.edge_client.drafting.onnx.tree import OnnxExpander, TreeKv
from outrider.edge_client.drafting.spec import DraftSpec
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import DRAFT_SOURCE, Continuations, TreeBudget, TreeDraft

CHUNK_SIZE = 64  # tokens fed at once when catching up


class OnnxDraftSequence:
    """Drafts one sequence in onnxruntime; `OnnxDraftModel.sequence` makes it.

        text    [ prompt … committed … ]
        cached  [ ids whose KV is in the buffers ][ speculated ids, may agree with later commits ]

    `cached` never contradicts `text` where both exist. After a tree its nodes follow in the buffers (`TreeKv`),
    until a commit moves the path that came true, or tokens are fed.
    """

    def __init__(
        self,
        session: Any,
        spec: DraftSpec,
        sampling: SamplingParams,
        num_prompt_tokens: int | None,
        num_support: int,
        dropout: DropoutPlan | None = None,
    ) -> None:
        self._spec = spec
        self._sampler = DraftSampler(sampling, spec.eos_token_ids, num_support)
        runner = OnnxRunner(session, spec, sampling.temperature, dropout)
        runner.set_seed(sampling.seed)
        self._runner: OnnxRunner | None = runner
        self._num_prompt_tokens = num_prompt_tokens
        self._text: list[int] = []
        self._cached: list[int] = []
        self._tree: TreeKv | None = None  # that starts after `cached`

    @property
    def position(self) -> int:
        """Returns the number of committed tokens."""
        return len(self._text)

    @property
    def cached_token_ids(self) -> Sequence[int]:
        """Returns the ids whose KV is in the buffers."""
        return self._cached

    def renew(self, sampling: SamplingParams, num_prompt_tokens: int | None, num_support: int) -> None:
        """Begins another text under other parameters; KV of their common prefix is reused."""
        assert self._runner is not None, "the sequence is closed"
        self._sampler = DraftSampler(sampling, self._spec.eos_token_ids, num_support)
        self._runner.set_temperature(sampling.temperature)
        self._runner.set_seed(sampling.seed)
        self._num_prompt_tokens = num_prompt_tokens
        self._text = []

    def keep_runner_ups(self) -> None:
        """Fills `Draft.runner_ups` from now on."""
        self._sampler.keeps_runner_ups = True

    def prepare(self, num_tokens: int) -> Iterator[None]:
        """See `Prepares.prepare`."""
        most = MAX_AHEAD_BYTES // (NOISE_BYTES * self._spec.num_tokens)
        end = min(self.position + min(num_tokens, most), self._spec.max_context)
        return self._sampler.prepare(range(self.position, end), self._spec.num_tokens)

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV buffers in bytes."""
        return self._runner.num_kv_bytes if self._runner else 0

    @property
    def parts(self) -> tuple[OnnxRunner, DraftSampler]:
        """Returns the runner and the sampler (benchmarks, tests)."""
        assert self._runner is not None, "the sequence is closed"
        return self._runner, self._sampler

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids; KV of proposed tokens that agree is kept. Raises `InvalidFieldError`."""
        for token_id in token_ids:
            if not 0 <= token_id < self._spec.num_tokens:
                raise InvalidFieldError(
                    "token_ids", f"{token_id} is not below the draft's {self._spec.num_tokens} tokens"
                )
        start = len(self._text)
        self._text.extend(token_ids)
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = len(self._text)
        self._keep_agreed(start)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens; the KV of dropped ones stays as speculation."""
        assert 0 <= position <= len(self._text), f"cannot truncate {len(self._text)} tokens to {position}"
        del self._text[position:]

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples up to `num_draft_tokens` tokens; see `DraftSequence.propose`."""
        assert self._text, "a draft needs at least one committed token"
        room = self._spec.max_context - len(self._text)
        num_draft_tokens = min(num_draft_tokens, room)
        if num_draft_tokens <= 0:
            return Draft((), ())
        token_ids: list[int] = []
        probs: list[float] = []
        signals: list[Signals] = []
        supports: list[Support] = []
        runner_ups: list[RunnerUp] = []
        rows = self._catch_up()
        while True:
            token_id, prob, signal, support = self._sample(rows, token_ids)
            stop = Stop.NO if should_stop is None else should_stop(token_id, signal, len(token_ids) + 1)
            if stop is Stop.BEFORE:
                break
            token_ids.append(token_id)
            probs.append(prob)
            signals.append(signal)
            if support is not None:
                supports.append(support)
            if self._sampler.runner_up is not None:
                runner_ups.append(self._sampler.runner_up)
            if stop is Stop.AFTER or len(token_ids) == num_draft_tokens:
                break
            rows = self._feed([token_id])
        doubted = signal if stop is Stop.BEFORE else None
        ids, told = tuple(token_ids), tuple(runner_ups)
        return Draft(ids, tuple(probs), tuple(signals), tuple(supports), doubted, told)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """See `ProposesTrees.propose_tree`. The likeliest path is what `propose` would sample."""
        room = self._spec.max_context - len(self._text)
        if room <= 0:
            return TreeDraft((), ())
        budget = replace(budget, max_depth=min(budget.max_depth, room))
        if self._sampler.has_supports:
            assert rule is None, "drawn trees have no signals"
            source = OnnxExpander[Support | None](self, self._support, None)
            return DrawnTreeBuilder(
                source, self._sampler.make_draw(len(self._text)), values.draws, budget
            ).build()
        tell = partial(self.tell, has_signals=rule is not None)
        expander = OnnxExpander(self, tell, Continuations((), (), DRAFT_SOURCE))
        return TreeBuilder([expander], values, budget, rule).build()

    def feed_root(self) -> Rows:
        """See `FeedsPaths.feed_root`."""
        assert self._text, "a draft needs at least one committed token"
        rows = self._catch_up()
        self._tree = TreeKv(len(self._text))
        return rows

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `FeedsPaths.feed_paths`."""
        assert self._runner is not None, "the sequence is closed"
        if not self._runner.takes_trees:
            for path in paths:
                yield self._feed_path(path), 1
            return
        assert self._tree is not None, "the root comes first"
        paths = paths[: self._spec.max_context - self._tree.end]
        if not paths:
            return
        bias = self._tree.add(paths)
        positions = [len(self._text) + len(path) - 1 for path in paths]
        rows = self._runner.feed_nodes([path[-1] for path in paths], positions, bias, self._tree.start)
        for index in range(len(paths)):
            yield rows.one(index), int(index == 0)

    def tell(self, rows: Rows, path: TokenIds, has_signals: bool = False) -> Continuations:
        """Returns what may follow a path, by the row after it, and on request the signals of each."""
        told = self._sampler.continuations(rows, len(self._text), len(path), *self._history(path))
        return replace(told, signals=signals_of(rows, told.token_ids)) if has_signals else told

    def _support(self, rows: Rows, path: TokenIds) -> Support:
        return self._sampler.support(rows, *self._history(path))

    def close(self) -> None:
        """Frees the KV."""
        self._runner = None

    def check_integrity(self) -> None:
        """Asserts that KV and committed tokens agree."""
        for index, (cached, committed) in enumerate(zip(self._cached, self._text, strict=False)):
            assert cached == committed, f"KV and text differ at {index}"
        if self._tree is not None:
            assert self._tree.start == len(self._cached), "the tree does not follow what is cached"
            self._tree.check_integrity()
        if self._runner is not None:
            assert len(self._cached) <= self._runner.capacity, "more KV than room"
            self._runner.check_integrity()

    def _catch_up(self) -> Rows:
        """Feed the committed ids the KV lacks, at least the last one; what follows it."""
        num_known = min(len(self._cached), len(self._text) - 1)
        del self._cached[num_known:]
        while True:
            chunk = self._text[len(self._cached) : len(self._cached) + CHUNK_SIZE]
            rows = self._feed(chunk)
            if len(self._cached) == len(self._text):
                return rows

    def _feed(self, token_ids: list[int]) -> Rows:
        assert self._runner is not None, "the sequence is closed"
        self._tree = None
        rows = self._runner.feed(token_ids, len(self._cached))
        self._cached.extend(token_ids)
        return rows

    def _feed_path(self, path: TokenIds) -> Rows:
        """Feeds what the cache lacks of a path, as speculation."""
        start = len(self._text)
        num_known = common_prefix(self._cached[start:], path[:-1])
        del self._cached[start + num_known :]
        return self._feed(list(path[num_known:]))

    def _keep_agreed(self, start: int) -> None:
        """Drops KV that contradicts the committed ids from `start` on; keeps that of a tree's path."""
        for index in range(start, min(len(self._text), len(self._cached))):
            if self._cached[index] != self._text[index]:
                del self._cached[index:]
                self._tree = None
                return
        path = tuple(self._text[len(self._cached) :])
        if self._tree is None or not path:
            return
        assert self._runner is not None, "the sequence is closed"
        slots = self._tree.follow(path)
        self._runner.move(slots, self._tree.start)
        self._tree.descend(path[: len(slots)])
        self._cached += path[: len(slots)]

    def _sample(self, rows: Rows, drafted: Sequence[int]) -> Sampled:
        return self._sampler.sample(rows, len(self._text), len(drafted), *self._history(drafted))

    def _history(self, drafted: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Returns prompt and output before the token after `drafted`, where sampling needs them."""
        if not self._sampler.needs_history:
            return (), ()
        num_prompt = self._num_prompt_tokens or 0
        return self._text[:num_prompt], [*self._text[num_prompt:], *drafted]
