"""Fakes behind the product's own small interfaces; no weights, no network."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.cloud_verifier.backends.base import ForwardItem, KVExhausted, Logits
from outrider.cloud_verifier.kv.blocks import BlockManager, BlockTable, BlockUsage
from outrider.common.tree import Tree


@dataclass(eq=False)
class FakeSequence:
    """KV that remembers its tokens, so that a test can compare them with the text."""

    table: BlockTable = field(repr=False)
    slots: list[int] = field(repr=False)  # what each slot of the backend's pool holds
    num_reused: int = 0
    is_closed: bool = False

    @property
    def length(self) -> int:
        return self.table.length

    @property
    def tokens(self) -> list[int]:
        return [self.slots[block_id] for block_id in self.table.block_ids]


def before(tokens: Sequence[int], index: int, parents: Sequence[int]) -> Sequence[int]:
    """What the token after `index` follows: of a tree at the end of `tokens` a path."""
    root = len(tokens) - len(parents)
    if index < root:
        return tokens[: index + 1]
    path = [root + node for node in Tree(parents).path(index - root)]
    return [*tokens[:root], *(tokens[i] for i in path)]


@functools.lru_cache(maxsize=1 << 14)  # tests with many texts ask for the same ones
def _logits_after(context: tuple[int, ...], vocab_size: int, num_tokens: int) -> np.ndarray:
    digest = hashlib.blake2b(repr(list(context)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    logits = rng.normal(scale=2.0, size=vocab_size).astype(np.float32)
    logits[0] -= 6.0  # end-of-text is rare
    logits[num_tokens:] = 100.0  # padding must be masked
    logits.flags.writeable = False
    return logits


class FakeBackend:
    """A target whose logits are a pure function of the last three tokens, read back from its KV.

    The product's own block manager keeps the KV, in blocks of one token: what fits is exact, and whatever it
    mixes up comes out as other text.
    """

    def __init__(self, num_tokens: int = 32, max_context: int = 64, kv_tokens: int = 10_000) -> None:
        self.num_tokens = num_tokens
        self.vocab_size = num_tokens + 3  # padded: the last three ids do not exist
        self.max_context = max_context
        self.max_tree_nodes = max_context
        self.dtype = self.kv_dtype = "float32"
        self.device, self.model_id = "cpu", "fake"
        self.fingerprint, self.tokenizer_fingerprint = "f" * 16, "t" * 16
        self.eos_token_ids: tuple[int, ...] = (0,)
        self.is_reproducible, self.quantisation = True, ""
        self.num_weight_bytes, self.num_kv_bytes = 1 << 20, 1 << 22
        self.staging = None
        self.num_forwards = 0
        self.num_query_rows = 0
        self.batches: list[list[int]] = []  # tokens fed per item, per forward
        self.kv_tokens = kv_tokens
        self.blocks = BlockManager(kv_tokens, block_size=1)
        self.slots = [-1] * kv_tokens
        self.sequences: list[FakeSequence] = []
        self.fail_next: Exception | None = None

    def logits_after(self, context: Sequence[int]) -> np.ndarray:
        """[vocab_size]: what this target thinks follows `context`."""
        return _logits_after(tuple(context[-3:]), self.vocab_size, self.num_tokens)

    @property
    def num_free_tokens(self) -> int:
        return self.blocks.num_free

    @property
    def kv_usage(self) -> BlockUsage:
        return self.blocks.usage

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> FakeSequence:
        table = self.blocks.new_table(tenant, token_ids)
        self.sequences.append(FakeSequence(table, self.slots, table.length))
        return self.sequences[-1]

    def publish(self, sequence: FakeSequence, token_ids: Sequence[int]) -> None:
        length = min(sequence.length, len(token_ids))
        assert sequence.tokens[:length] == list(token_ids[:length]), "published as KV of another text"
        self.blocks.publish(sequence.table, token_ids)

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        num_fed = [len(item.token_ids) for item in items]
        num_needed = sum(
            self.blocks.num_blocks_needed(item.sequence.table, len(item.token_ids)) for item in items
        )
        if num_needed > self.num_free_tokens:
            raise KVExhausted(f"{num_needed} slots needed, {self.num_free_tokens} free")
        rows = []
        for item in items:
            sequence = item.sequence
            assert isinstance(sequence, FakeSequence) and not sequence.is_closed
            assert 0 < len(item.token_ids) and item.num_logit_rows <= len(item.token_ids)
            start = sequence.length
            copy = self.blocks.append(sequence.table, len(item.token_ids))
            assert copy is None, "blocks of one token are never partly filled"
            assert sequence.length <= self.max_context
            written = sequence.table.block_ids[start:]
            for block_id, token_id in zip(written, item.token_ids, strict=True):
                self.slots[block_id] = token_id
            first = sequence.length - item.num_logit_rows
            assert first >= start
            tokens = sequence.tokens
            rows += [self.logits_after(before(tokens, i, item.parents)) for i in range(first, len(tokens))]
        self.num_forwards += 1
        self.num_query_rows += sum(num_fed)
        self.batches.append(num_fed)
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)

    def truncate(self, sequence: FakeSequence, length: int) -> None:
        self.blocks.truncate(sequence.table, length)

    def keep(self, sequence: FakeSequence, start: int, nodes: Sequence[int]) -> None:
        kept = [sequence.tokens[start + node] for node in nodes]
        for block_id, token_id in zip(sequence.table.block_ids[start:], kept, strict=False):
            self.slots[block_id] = token_id
        self.truncate(sequence, start + len(nodes))

    def close(self, sequence: FakeSequence, *, is_wrong: bool = False) -> None:
        sequence.is_closed = True
        if is_wrong:
            self.blocks.unpublish(sequence.table)
        self.blocks.free(sequence.table)
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def check_integrity(self) -> None:
        self.blocks.check_integrity()


class GatedBackend(FakeBackend):
    """Forwards wait while the gate is shut, which one of them may do before it begins."""

    def __init__(self, shuts_at: int = 0, max_context: int = 100_000, kv_tokens: int = 300_000) -> None:
        super().__init__(max_context=max_context, kv_tokens=kv_tokens)
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun, self._shuts_at = 0, shuts_at

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        self.num_begun += 1
        if self.num_begun == self._shuts_at:
            self.gate.clear()
        assert self.gate.wait(60)
        return super().forward(items)
