"""Drafts one sequence by a model with a KV cache: its committed ids, and the ids whose KV is in the buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import Guess, ShouldStop
from outrider.edge_client.drafting.noise_ahead import MAX_AHEAD_BYTES, NOISE_BYTES
from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import RowsSequence
from outrider.edge_client.drafting.rows.tree import TreeKv
from outrider.edge_client.drafting.spec import HIDDEN

_MAX_ROWS = (
    4  # committed tokens that are fed together with guesses; a row costs more than a token without one
)
CHUNK_SIZE = 64  # tokens fed at once when catching up, on a CPU


class Runner(Protocol):
    """Feeds the tokens of one sequence and keeps their KV. Each call says how much of it is valid, so rollback is a
    smaller number."""

    @property
    def takes_trees(self) -> bool:
        """Returns whether `feed_nodes` is possible."""

    @property
    def capacity(self) -> int:
        """Returns how many positions the KV buffers hold."""

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV buffers in bytes."""

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature of the tempered rows; 0 counts as 1."""

    def set_seed(self, seed: int) -> None:
        """Sets the seed of what is random in a run, where anything is."""

    def feed(self, token_ids: Sequence[int], num_past: int) -> Rows:
        """Runs `token_ids` after the first `num_past` positions and returns the rows after the last, which the next
        call may overwrite. Raises `ModelError` where the runtime fails."""

    def feed_nodes(
        self, token_ids: Sequence[int], position_ids: Sequence[int], bias: NDArray[np.float32], start: int
    ) -> Rows:
        """Runs n nodes of a tree into the last n of the m slots from `start` on; returns a row after each.

        `bias` [n, m] is `spec.HIDDEN` where a node does not see a slot, else 0; no node sees a slot after its own,
        and each sees those before `start`. Slots may outnumber positions, but not the draft's context. The next
        call may overwrite the rows; there are no candidates. Raises `ModelError` where the runtime fails.
        """

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copies the KV of rising `slots` to those from `start` on."""

    def free_scratch(self) -> None:
        """Frees the buffers of the largest run so far; the KV stays. Temperature and seed have to be set again."""

    def check_integrity(self) -> None:
        """Asserts that the buffers agree with each other."""


Adapt = Callable[[Rows, int, float, int, Sequence[int]], None]
"""Takes rows, the index of one, the temperature of the tempered ones, the position of the token that the row is about,
and the last tokens before it; may change the row in place (`drafting.learned`)."""
NUM_BEFORE = 16  # tokens that it is told: with the position they tell which row a verdict belongs to

Its = TypeVar("Its", bound=Runner)


class KvSequence(RowsSequence, Generic[Its]):
    """Drafts one sequence with a runner's rows.

        text    [ prompt … committed … ]
        cached  [ ids whose KV is in the buffers ][ speculated ids, may agree with later commits ]

    `cached` never contradicts `text` where both exist. After a tree its nodes follow in the buffers (`TreeKv`),
    until a commit moves the path that came true, or tokens are fed.
    """

    def __init__(
        self,
        runner: Its,
        sampler: DraftSampler,
        num_tokens: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        num_prompt_tokens: int | None,
        chunk_size: int = CHUNK_SIZE,
        adapt: Adapt | None = None,
    ) -> None:
        """`runner` and `sampler` are made for the same temperature and seed; the runner is this sequence's alone.
        `adapt` is called once on every row before anything reads it."""
        super().__init__(sampler, num_tokens, max_context, num_prompt_tokens)
        self._eos_token_ids = eos_token_ids
        self._chunk_size = chunk_size
        self._adapt = adapt
        self._runner: Its | None = runner
        self._cached: list[int] = []
        self._tree: TreeKv | None = None  # that starts after `cached`
        self._guess: Guess | None = None
        self._num_wanted = 0  # tokens of the chain under way
        self._ahead: Rows | None = None  # rows after the last of `cached`, of one run with guesses

    @property
    def cached_token_ids(self) -> Sequence[int]:
        """Returns the ids whose KV is in the buffers."""
        return self._cached

    def rest(self) -> None:
        """Ends the text and frees all but its KV, until `renew`: rows, masks, noise and a grammar's state take more
        than the KV where the vocabulary is large."""
        assert self._runner is not None, "the sequence is closed"
        self._runner.free_scratch()
        self._sampler = DraftSampler(SamplingParams(), self._eos_token_ids)
        self._text, self._tree, self._guess, self._ahead = [], None, None, None

    def renew(self, sampling: SamplingParams, num_prompt_tokens: int | None, num_support: int) -> None:
        """Begins another text under other parameters; KV of their common prefix is reused."""
        assert self._runner is not None, "the sequence is closed"
        self._sampler = DraftSampler(sampling, self._eos_token_ids, num_support)
        self._runner.set_temperature(sampling.temperature)
        self._runner.set_seed(sampling.seed)
        self._num_prompt_tokens = num_prompt_tokens

    def guess_by(self, guess: Guess) -> None:
        """See `TakesGuesses.guess_by`."""
        assert self._runner is not None, "the sequence is closed"
        if self._runner.takes_trees:
            self._guess = guess

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """See `DraftSequence.propose`."""
        self._num_wanted = num_draft_tokens
        try:
            return super().propose(num_draft_tokens, should_stop)
        finally:
            self._num_wanted = 0

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        """See `ProposesAlong.propose_along`; all of it is one run."""
        assert self._runner is not None, "the sequence is closed"
        start, num_told = self.position, len(token_ids)
        has_room = start + num_told < self._max_context
        if not token_ids or not has_room or not self._runner.takes_trees or self._sampler.needs_history:
            self.commit(token_ids)
            return ()
        first, *_ = self._sampler.sample(self._begin(), start)
        self.commit(token_ids)
        rows, ends = self._feed_rows(token_ids), range(start + 1, start + num_told + 1)
        return first, *(self._sampler.sample(rows.one(i), end)[0] for i, end in enumerate(ends))

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        """Fills `Draft.runner_ups` from now on, or no longer."""
        self._sampler.keeps_runner_ups = is_wanted

    def prepare(self, num_tokens: int) -> Iterator[None]:
        """See `Prepares.prepare`."""
        most = MAX_AHEAD_BYTES // (NOISE_BYTES * self._num_tokens)
        end = min(self.position + min(num_tokens, most), self._max_context)
        return self._sampler.prepare(range(self.position, end), self._num_tokens)

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV buffers in bytes."""
        return self._runner.num_kv_bytes if self._runner else 0

    @property
    def parts(self) -> tuple[Its, DraftSampler]:
        """Returns the runner and the sampler (benchmarks, tests)."""
        assert self._runner is not None, "the sequence is closed"
        return self._runner, self._sampler

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed ids; KV of proposed tokens that agree is kept. Raises `InvalidFieldError`."""
        start = len(self._text)
        super().commit(token_ids)
        self._keep_agreed(start)

    def feed_root(self) -> Rows:
        """See `RowsSequence.feed_root`."""
        assert self._text, "a draft needs at least one committed token"
        rows = self._begin()
        self._tree = TreeKv(len(self._text))
        return rows

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`."""
        assert self._runner is not None, "the sequence is closed"
        if not self._runner.takes_trees:
            for path in paths:
                yield self._feed_path(path), 1
            return
        assert self._tree is not None, "the root comes first"
        paths = paths[: self._max_context - self._tree.end]
        if not paths:
            return
        bias = self._tree.add(paths)
        positions = [len(self._text) + len(path) - 1 for path in paths]
        rows = self._runner.feed_nodes([path[-1] for path in paths], positions, bias, self._tree.start)
        if self._adapt is not None:
            before = self._text[-NUM_BEFORE:]
            for index, path in enumerate(paths):
                end = len(self._text) + len(path)
                self._adapt(rows, index, self._sampler.temperature, end, [*before, *path])
        for index in range(len(paths)):
            yield rows.one(index), int(index == 0)

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

    def _begin(self) -> Rows:
        """Feeds the committed ids that the KV lacks, at least the last one."""
        num_known = min(len(self._cached), len(self._text) - 1)
        del self._cached[num_known:]
        while True:
            chunk = self._text[len(self._cached) : len(self._cached) + self._chunk_size]
            rows = self._feed(chunk)
            if len(self._cached) >= len(self._text):  # guesses may follow
                return rows

    def _go_on(self, drafted: Sequence[int]) -> Rows:
        start, end = len(self._text), len(self._text) + len(drafted)
        if self._ahead is not None and self._cached[start:end] == drafted:
            return self._ahead.one(end - len(self._cached) - 1 + len(self._ahead.logits))
        del self._cached[end - 1 :]
        return self._feed([drafted[-1]], tuple(drafted))

    def _feed(self, token_ids: list[int], drafted: TokenIds = ()) -> Rows:
        assert self._runner is not None, "the sequence is closed"
        self._tree = self._ahead = None
        end = len(self._cached) + len(token_ids)
        room = min(self._num_wanted - len(drafted) - 1, self._max_context - end, _MAX_ROWS - len(token_ids))
        if self._guess is not None and room > 0 and end == len(self._text) + len(drafted):
            if guessed := self._guess(drafted, room):
                return self._feed_ahead(token_ids, guessed[:room])
        rows = self._runner.feed(token_ids, len(self._cached))
        self._cached.extend(token_ids)
        if self._adapt is not None:
            before = self._cached[-NUM_BEFORE:]
            self._adapt(rows, 0, self._sampler.temperature, len(self._cached), before)
        return rows

    def _feed_ahead(self, token_ids: list[int], guessed: TokenIds) -> Rows:
        """Feeds tokens and, in the same run, what may follow them; returns the row after the tokens."""
        self._ahead = self._feed_rows((*token_ids, *guessed))
        return self._ahead.one(len(token_ids) - 1)

    def _feed_rows(self, token_ids: Sequence[int]) -> Rows:
        """Feeds tokens that follow one another, and returns the row after each."""
        assert self._runner is not None, "the sequence is closed"
        start, num_fed = len(self._cached), len(token_ids)
        bias = np.triu(np.full((num_fed, num_fed), HIDDEN, np.float32), 1)
        rows = self._runner.feed_nodes(token_ids, range(start, start + num_fed), bias, start)
        self._cached += token_ids
        if self._adapt is not None:
            for index in range(num_fed):
                end = start + index + 1
                before = self._cached[max(0, end - NUM_BEFORE) : end]
                self._adapt(rows, index, self._sampler.temperature, end, before)
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
