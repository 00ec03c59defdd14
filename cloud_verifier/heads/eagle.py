"""EAGLE: drafts by one decoder layer on the target's features, with KV of its own (`eagle_modules`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.eagle_kv import EagleKv, WaitingStates
from outrider.cloud_verifier.heads.eagle_modules import EagleDraft, attention
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.sequence import Head, HeadFacts, HeadSequence
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.tree import TreeKv
from outrider.edge_client.drafting.spec import HIDDEN

CHUNK = 256  # pairs that a run of the layer reads at most
MAX_DEPTH = 6  # tokens of a path, as in the code of its authors; deeper runs cost more than they add


class EagleHead(Head):
    """Implements `DraftSource` and `TellsFeatures`: the layer and what belongs to it. It keeps features fused."""

    weights: EagleDraft

    def __init__(self, backend: PagedBackend, facts: HeadFacts, weights: EagleDraft) -> None:
        super().__init__(backend, facts, weights, EagleSequence)

    @torch.inference_mode()
    def last_features(self, rows: slice) -> Tensor:
        """Returns the states [tokens, size] of the features of some tokens of the target's last forward."""
        return self.weights.fuse(super().last_features(rows))

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the draft's input embeddings [n, size], its own where it has them."""
        own = self.weights.embedding
        if own is None:
            return super().embed(token_ids)
        embedded: Tensor = own(torch.tensor(token_ids, dtype=torch.int64, device=self.backend.device))
        return embedded

    def score(self, states: Tensor) -> Tensor:
        """Returns logits [n, vocab_size] of next states [n, size]."""
        scored = self.weights.scored(states)
        logits: Tensor = (self.weights.output or self.backend.decoder.score)(scored)
        return logits


class EagleSequence(HeadSequence):
    """Drafts one sequence. Its KV is that of pairs (x[t + 1], f[t]) of the target's own features; what it computes for
    drafted tokens is dropped with the next verdict, when their features are known.

        text   x[0] … x[n - 1]
        pairs  (x[1], f[0]) … (x[n - 1], f[n - 2])      the last one's state is scored for the first drafted token
        nodes  (drafted, state of the pair or node before) …

    Where features are missing (the prefix cache, an eviction) the pairs after them are read at their own positions.
    """

    def __init__(
        self, head: Head, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(head, sampler, temperature, num_prompt_tokens)
        self._eagle = cast(EagleHead, head)
        self._waiting = WaitingStates()
        self._kv = EagleKv()
        self._tree: TreeKv | None = None  # that starts after the pairs
        self._states: dict[
            TokenIds, Tensor
        ] = {}  # by path, after its last token, [1, size]; after the last pair by ()

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV and of the states that wait for it, in bytes."""
        return self._kv.num_bytes + self._waiting.num_bytes

    @property
    def is_ready(self) -> bool:
        """Returns whether the pair is known that ends with the last committed token."""
        position = len(self._text) - 2
        is_fed = bool(self._states) and self._kv.positions[-1] == position
        return is_fed or self._waiting.num_before(position + 1) > self._waiting.num_before(position)

    def read(self, features: FeatureLog) -> None:
        """Takes the features that it has not read before. Those of a long prompt become KV as tokens are committed."""
        start, states = features.start, features.take()
        if states is not None:
            known = max((*self._waiting.positions[-1:], *self._kv.positions[-1:]), default=-1) + 1
            self._waiting.append(start, states, known)

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens, and to the pairs of them."""
        super().truncate(position)
        num_pairs = len(self._kv.positions)
        self._kv.truncate(position - 1)
        self._waiting.truncate(position)
        if len(self._kv.positions) < num_pairs:
            self._forget_nodes()

    def feed_root(self) -> Rows:
        """See `RowsSequence.feed_root`. Feeds the pairs that the KV lacks."""
        num_known = self._waiting.num_before(len(self._text) - 1)
        for start in range(0, num_known, CHUNK):
            positions, states = self._waiting.take(min(CHUNK, num_known - start))
            self._feed_pairs(positions, states)
        self._tree = TreeKv(len(self._kv.positions))
        self._states = {(): self._states[()]}
        return self._rows(self._eagle.score(self._states[()]))

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`. All paths are one run of the layer."""
        assert self._tree is not None, "the root comes first"
        if not paths:
            return
        start, num_pairs = self._tree.end, self._tree.start
        bias = torch.zeros(len(paths), start + len(paths))
        bias[:, num_pairs:] = torch.from_numpy(self._tree.add(paths))
        states = torch.cat([self._states[path[:-1]] for path in paths])
        positions = [len(self._text) - 2 + len(path) for path in paths]
        nexts = self._run([path[-1] for path in paths], states, positions, start, bias)
        self._states |= zip(paths, torch.split(nexts, 1), strict=True)
        rows = self._rows(self._eagle.score(nexts))
        for index in range(len(paths)):
            yield rows.one(index), int(index == 0)

    def close(self) -> None:
        """Frees the KV."""
        self._waiting, self._kv = WaitingStates(), EagleKv()
        self._forget_nodes()

    def check_integrity(self) -> None:
        """Asserts that pairs are of committed tokens, and that a tree follows them."""
        self._kv.check_integrity()
        positions = self._kv.positions
        assert not positions or positions[-1] < len(self._text) - 1, "KV of a token that is not committed"
        if self._tree is not None:
            assert self._tree.start == len(positions), "the tree does not follow the pairs"
            self._tree.check_integrity()

    def _feed_pairs(self, positions: list[int], states: Tensor) -> None:
        start, count = len(self._kv.positions), len(positions)
        bias = torch.zeros(count, start + count)
        bias[:, start:] = torch.full((count, count), HIDDEN).triu(1)
        token_ids = [self._text[position + 1] for position in positions]
        self._states = {(): self._run(token_ids, states, positions, start, bias)[-1:]}
        self._kv.positions += positions

    def _run(
        self, token_ids: Sequence[int], states: Tensor, positions: Sequence[int], start: int, bias: Tensor
    ) -> Tensor:
        """Returns the next states [n, size] of pairs or nodes, whose KV takes the slots from `start` on."""
        device, dtype = states.device, states.dtype
        attend = partial(self._attend, start, bias.to(device, dtype))
        embedded = self._eagle.embed(token_ids)
        nexts: Tensor = self._eagle.weights(embedded, states, torch.tensor(positions, device=device), attend)
        return nexts

    def _attend(self, start: int, bias: Tensor, query: Tensor, own: Tensor) -> Tensor:
        return attention(query, self._kv.extend(start, own), bias)

    def _forget_nodes(self) -> None:
        self._tree, self._states = None, {}
