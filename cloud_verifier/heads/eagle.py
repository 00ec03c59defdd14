"""EAGLE: drafts by one decoder layer on the target's features, with KV of its own (`eagle_modules`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.eagle_kv import BLOCK, EagleKv, RunKv, WaitingStates
from outrider.cloud_verifier.heads.eagle_modules import EagleDraft, attention_side_by_side
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.sequence import Asked, Head, HeadFacts, HeadRun, HeadSequence, Row
from outrider.cloud_verifier.verification.staging import upload
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.tree import TreeKv
from outrider.edge_client.drafting.spec import HIDDEN

CHUNK = 256  # pairs that a run of the layer reads at most
FEW = 16  # pairs that are read together with those of other sequences, which are padded to as many
MAX_DEPTH = 6  # tokens of a path, as in the code of its authors; deeper runs cost more than they add


class EagleHead(Head):
    """Implements `DraftSource` and `TellsFeatures`: the layer and what belongs to it. It keeps features fused."""

    weights: EagleDraft

    def __init__(self, backend: PagedBackend, facts: HeadFacts, weights: EagleDraft) -> None:
        super().__init__(backend, facts, weights, EagleRun, EagleSequence)

    @torch.inference_mode()
    def last_features(self, rows: slice) -> Tensor:
        """Returns the states [tokens, size] of the features of some tokens of the target's last forward."""
        return self.weights.fuse(super().last_features(rows))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the draft's input embeddings [*, size], its own where it has them."""
        own = self.weights.embedding
        embedded: Tensor = super().embed(token_ids) if own is None else own(token_ids)
        return embedded

    def score(self, states: Tensor) -> Tensor:
        """Returns logits [n, vocab_size] of next states [n, size]."""
        scored = self.weights.scored(states)
        logits: Tensor = (self.weights.output or self.backend.decoder.score)(scored)
        return logits


class EagleSequence(HeadSequence):
    """Holds what one sequence keeps between drafts: the KV of its pairs (x[t + 1], f[t]), and the state of the last.

        text   x[0] … x[n - 1]
        pairs  (x[1], f[0]) … (x[n - 1], f[n - 2])      the last one's state is scored for the first drafted token

    Where features are missing (the prefix cache, an eviction) the pairs after them are read at their own positions.
    """

    def __init__(
        self, head: Head, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(head, sampler, temperature, num_prompt_tokens)
        self._waiting = WaitingStates()
        self.kv = EagleKv()
        self.last_state: Tensor | None = None  # [1, size], after the last pair

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV and of the states that wait for it, in bytes."""
        return self.kv.num_bytes + self._waiting.num_bytes

    @property
    def is_ready(self) -> bool:
        """Returns whether the pair is known that ends with the last committed token."""
        position = len(self._text) - 2
        is_fed = self.last_state is not None and self.kv.positions[-1] == position
        return is_fed or self._waiting.num_before(position + 1) > self._waiting.num_before(position)

    @property
    def num_unread(self) -> int:
        """Returns how many pairs of committed tokens are not in the KV."""
        return self._waiting.num_before(len(self._text) - 1)

    def read(self, features: FeatureLog) -> None:
        """Takes the features that it has not read before. Those of a long prompt become KV as tokens are committed."""
        start, states = features.start, features.take()
        if states is not None:
            known = max((*self._waiting.positions[-1:], *self.kv.positions[-1:]), default=-1) + 1
            self._waiting.append(start, states, known)

    def take(self, num_pairs: int) -> tuple[list[int], list[int], Tensor]:
        """Returns the next pairs to be read: positions, token ids, and states [num_pairs, size]."""
        positions, states = self._waiting.take(num_pairs)
        return positions, [self._text[position + 1] for position in positions], states

    def keep(self, positions: list[int], own: Tensor, last_state: Tensor) -> None:
        """Keeps the KV [2, kv_heads, n, head_dim] of pairs that were read, and the state after the last [1, size]."""
        self.kv.append(positions, own)
        self.last_state = last_state

    def truncate(self, position: int) -> None:
        """Rolls back to the first `position` tokens, and to the pairs of them."""
        super().truncate(position)
        num_pairs = len(self.kv.positions)
        self.kv.truncate(position - 1)
        self._waiting.truncate(position)
        if len(self.kv.positions) < num_pairs:
            self.last_state = None

    def close(self) -> None:
        """Frees the KV."""
        self._waiting, self.kv, self.last_state = WaitingStates(), EagleKv(), None

    def check_integrity(self) -> None:
        """Asserts that pairs are of committed tokens."""
        self.kv.check_integrity()
        positions = self.kv.positions
        assert not positions or positions[-1] < len(self._text) - 1, "KV of a token that is not committed"


class EagleRun(HeadRun):
    """Runs sequences of about one length side by side: a group has those whose blocks of KV, rounded up to a power of
    two, are as many, so that not much more than half of it is padding, however long one text is."""

    _sequences: Sequence[EagleSequence]

    def __init__(self, head: Head, sequences: Sequence[HeadSequence]) -> None:
        super().__init__(head, sequences)
        numbers: dict[int, list[int]] = defaultdict(list)  # by the size of the group's KV
        for number, each in enumerate(self._sequences):
            num_pairs = len(each.kv.positions) + each.num_unread
            numbers[(max(0, num_pairs - 1) // BLOCK).bit_length()].append(number)
        self._groups = [
            (group, _SideBySide(head, [sequences[number] for number in group])) for group in numbers.values()
        ]

    def roots(self) -> list[Row]:
        """See `HeadRun.roots`."""
        found = {n: row for group, run in self._groups for n, row in zip(group, run.roots(), strict=True)}
        return [found[number] for number in range(len(self._sequences))]

    def after(self, asked: Sequence[Asked]) -> list[list[Row]]:
        """See `HeadRun.after`. All paths of a group are one run of the layer."""
        found: dict[int, list[Row]] = {}
        paths_of = dict(asked)
        for group, run in self._groups:
            places = [place for place, number in enumerate(group) if number in paths_of]
            if places:
                rows = run.after([(place, paths_of[group[place]]) for place in places])
                found |= zip((group[place] for place in places), rows, strict=True)
        return [found[number] for number, _ in asked]


class _SideBySide(HeadRun):
    """Runs the layer for several sequences at once, each padded to the longest: once for the pairs that they have not
    read, and for the nodes that they ask for at a time.

    A node reads the state of the pair or node before in the place of a feature. Its KV is dropped with the run, as its
    features are known after the verdict.
    """

    _head: EagleHead
    _sequences: Sequence[EagleSequence]

    def __init__(self, head: Head, sequences: Sequence[HeadSequence]) -> None:
        super().__init__(head, sequences)
        for each in self._sequences:
            while (num_more := each.num_unread - FEW) > 0:
                self._feed([each], [min(CHUNK, num_more)])
        self._kv = self._feed(self._sequences, [each.num_unread for each in self._sequences])
        self._trees = [TreeKv(self._kv.end) for _ in sequences]
        self._states = torch.cat([_known(each.last_state) for each in self._sequences])  # [n, size]
        # By sequence and path, where the state after its last token is.
        self._rows: dict[tuple[int, TokenIds], int] = {
            (number, ()): number for number in range(len(sequences))
        }

    def roots(self) -> list[Row]:
        """See `HeadRun.roots`."""
        numbers = range(len(self._sequences))
        return self._read(self._head.score(self._states), [(number, number, 0) for number in numbers])

    def after(self, asked: Sequence[Asked]) -> list[list[Row]]:
        """See `HeadRun.after`."""
        width, kv = max(len(paths) for _, paths in asked), self._kv
        end = kv.end + width
        ids, positions, before = np.zeros((3, len(self._sequences), width), np.int64)
        bias = np.full((len(self._sequences), width, end - self._trees[0].start), HIDDEN, np.float32)
        for number, paths in asked:
            visible = self._trees[number].add(paths)
            bias[number, : len(paths), : visible.shape[1]] = visible
            for place, path in enumerate(paths):
                ids[number, place] = path[-1]
                positions[number, place] = len(self._sequences[number].token_ids) - 2 + len(path)
                before[number, place] = self._rows[number, path[:-1]]
        for tree in self._trees:
            tree.end = end  # slots are left out where a sequence asks for less
        states, fed = self._states, upload([ids, positions, before, bias], self._states.device)
        nexts = self._run(kv, fed[0], states[fed[2]], fed[1], fed[3])
        first, flat = len(self._states), nexts.flatten(0, 1)
        self._states = torch.cat((self._states, flat))
        places = [(number, path) for number, paths in asked for path in paths]
        rows = [number * width + place for number, paths in asked for place in range(len(paths))]
        self._rows |= {place: first + row for place, row in zip(places, rows, strict=True)}
        of = [(row, number, len(path)) for row, (number, path) in zip(rows, places, strict=True)]
        found = iter(self._read(self._head.score(flat), of))
        return [[next(found) for _ in paths] for _, paths in asked]

    def _feed(self, sequences: Sequence[EagleSequence], counts: Sequence[int]) -> RunKv:
        """Reads so many pairs of each sequence; returns the KV of all, these included."""
        weights, width = self._head.weights, max(counts)
        kv = RunKv([each.kv for each in sequences], weights.device, weights.dtype)
        if not width:
            return kv
        taken = {n: sequences[n].take(count) for n, count in enumerate(counts) if count}
        ids, positions = np.zeros((2, len(sequences), width), np.int64)
        for number, (places, token_ids, _) in taken.items():
            ids[number, : len(places)], positions[number, : len(places)] = token_ids, places
        some = next(iter(taken.values()))[2]
        states = [taken[n][2] if n in taken else some[:0] for n in range(len(sequences))]
        bias = np.triu(np.full((1, width, width), HIDDEN, np.float32), 1)
        fed = upload([ids, positions, bias], some.device)
        nexts = self._run(kv, fed[0], pad_sequence(states, batch_first=True), fed[1], fed[2])
        own = kv.last(width)
        for number, (places, _, _) in taken.items():
            count = len(places)
            sequences[number].keep(places, own[:, number, :, :count], nexts[number, count - 1 : count])
        kv.show(counts)
        return kv

    def _run(self, kv: RunKv, ids: Tensor, states: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Returns the next states [sequences, n, size] of pairs or nodes. `bias` [sequences or 1, n, m] is that of the
        columns after those which `kv` shows."""
        seen = kv.bias.expand(-1, ids.shape[1], -1)
        whole = torch.cat((seen, bias.to(seen.dtype).expand(len(seen), -1, -1)), dim=-1)

        def attend(query: Tensor, own: Tensor) -> Tensor:
            return attention_side_by_side(query, kv.extend(own), whole)

        nexts: Tensor = self._head.weights(self._head.embed(ids), states, positions, attend)
        return nexts


def _known(state: Tensor | None) -> Tensor:
    assert state is not None, "the last pair was read"
    return state
