"""Paged attention by scaled_dot_product_attention over views and gathered blocks: any device, any dtype.

A step of many short sequences is a few padded calls: the fixed cost of a call (and of waking the second core)
is paid once, and gathering whole blocks is cheap. A long sequence attends alone, over a view of the pool
where its blocks are one run. Blocks are gathered into buffers that are kept: allocating memory of that size
costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cloud_verifier.backends.attention.packing import PackedSequence, group_similar, pad_tables
from outrider.cloud_verifier.backends.attention.plan import (
    AttentionPlanner,
    AttentionRule,
    PagedAttention,
    softmax_attention,
)
from outrider.kernels.fp8 import dequantize
from outrider.kernels.kv_pool import KVPool

MAX_FOLDED_QUERIES = 64  # beyond it the mask of folded heads costs more than repeating keys


class BlockGatherer:
    """Copies blocks out of a pool into memory that the next call uses again."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def __call__(self, pool: KVPool, block_ids: torch.Tensor, which: int) -> torch.Tensor:
        """Returns [tokens, kv_heads, head_dim] of whole blocks.

        It is valid until the next call with the same `which` (0: keys, 1: values).
        """
        num_blocks, num_tokens = block_ids.shape[0], block_ids.shape[0] * pool.block_size
        flat = pool.rows.flatten(1)
        buffer = self._buffers[which]
        if buffer is None or buffer.shape[0] < num_blocks:
            buffer = self._buffers[which] = flat.new_empty((2 * num_blocks, flat.shape[1]))
        rows = buffer[:num_blocks]
        torch.index_select(flat, 0, block_ids, out=rows)
        rows = rows.view(num_tokens, *pool.rows.shape[2:])
        if pool.scales is None:
            return rows
        scales = pool.scales.flatten(1).index_select(0, block_ids).view(num_tokens, -1)
        return dequantize(rows, scales, pool.dtype)


@dataclass(slots=True)
class Segment:
    """Holds the attention of one sequence on its own.

    Rows start … stop−1 of the packed queries attend over `kv_length` tokens: a slice of the pool's slots
    where the sequence is one run, else the first ones of gathered blocks. `mask` is additive: [num_groups *
    num_queries, kv_length] when heads are folded, [num_queries, kv_length] when not, None where every row sees all keys
    (or those that `is_causal` leaves).
    """

    start: int
    stop: int
    kv: slice | torch.Tensor
    kv_length: int
    mask: torch.Tensor | None
    is_folded: bool
    is_causal: bool = False

    def attend(
        self,
        query: torch.Tensor,
        key_pool: KVPool,
        value_pool: KVPool,
        rule: AttentionRule,
        gather: BlockGatherer,
    ) -> torch.Tensor:
        """Returns [stop − start, heads, head_dim] for queries [heads, rows, head_dim]."""
        # [1, kv_heads, kv_length, head_dim]
        keys = self._tokens(key_pool, gather, 0).transpose(0, 1)[None]
        values = self._tokens(value_pool, gather, 1).transpose(0, 1)[None]
        query = query[:, self.start : self.stop]
        num_heads, num_queries, head_dim = query.shape
        if self.is_folded:
            # The query heads that share a key head become rows of it: no copy of the keys, one product.
            folded = query.reshape(1, keys.shape[1], -1, head_dim)
            out = softmax_attention(folded, keys, values, rule, self.mask)
            out = out.reshape(num_heads, num_queries, head_dim)
        else:
            out = softmax_attention(query[None], keys, values, rule, self.mask, is_causal=self.is_causal)[0]
        return out.transpose(0, 1)

    def _tokens(self, pool: KVPool, gather: BlockGatherer, which: int) -> torch.Tensor:
        if isinstance(self.kv, slice):
            return pool.read(self.kv)
        return gather(pool, self.kv, which)[: self.kv_length]


@dataclass(slots=True)
class PaddedGroup:
    """Holds the attention of several sequences in one call: rows padded to the most, KV to the longest."""

    rows: slice | torch.Tensor  # packed rows in order of the group, padding included
    answered: torch.Tensor | None  # of these the real ones; None: all
    target: slice | torch.Tensor  # where the answers go
    block_ids: torch.Tensor  # [num_sequences * max_blocks]
    mask: torch.Tensor  # [num_sequences, 1, num_groups * max_queries, max_length]

    def attend(
        self,
        query: torch.Tensor,
        key_pool: KVPool,
        value_pool: KVPool,
        rule: AttentionRule,
        gather: BlockGatherer,
    ) -> torch.Tensor:
        """Returns [answered rows, heads, head_dim] for queries [heads, rows, head_dim]."""
        num_sequences, num_heads, head_dim = self.mask.shape[0], query.shape[0], query.shape[2]
        keys = gather(key_pool, self.block_ids, 0)
        values = gather(value_pool, self.block_ids, 1)
        # [num_sequences, kv_heads, max_length, head_dim]
        keys, values = (
            each.view(num_sequences, -1, *each.shape[1:]).transpose(1, 2) for each in (keys, values)
        )
        num_kv_heads = keys.shape[1]
        query = query[:, self.rows] if isinstance(self.rows, slice) else query.index_select(1, self.rows)
        folded = query.reshape(num_kv_heads, num_heads // num_kv_heads, num_sequences, -1, head_dim)
        folded = folded.permute(2, 0, 1, 3, 4).reshape(num_sequences, num_kv_heads, -1, head_dim)
        out = softmax_attention(folded, keys, values, rule, self.mask)
        out = out.reshape(num_sequences, num_heads, -1, head_dim).transpose(1, 2).flatten(0, 1)
        return out if self.answered is None else out.index_select(0, self.answered)


class SdpaPlanner(AttentionPlanner):
    """Implements `AttentionPlanner`. Not thread-safe: one plan is used at a time."""

    def __init__(
        self, block_size: int, max_context: int, num_groups: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._dtype = dtype
        self._device = device
        self._max_context = max_context
        self._gather = BlockGatherer()
        # Row i sees columns up to max_context + i; a window of it is the mask of any (queries, length).
        columns = torch.arange(max_context + MAX_FOLDED_QUERIES, device=device)
        rows = torch.arange(MAX_FOLDED_QUERIES, device=device)[:, None]
        self._strip = self._additive(columns > max_context + rows)

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        groups = group_similar(sequences)
        parts_of: dict[int | None, list[tuple[slice | torch.Tensor, Segment | PaddedGroup]]] = {}  # by window
        gather = self._gather

        def attend(
            query: torch.Tensor, key_pool: KVPool, value_pool: KVPool, rule: AttentionRule
        ) -> torch.Tensor:
            if (parts := parts_of.get(rule.window)) is None:
                parts = parts_of[rule.window] = [self._part(group, rule.window) for group in groups]
            if len(parts) == 1:
                return parts[0][1].attend(query, key_pool, value_pool, rule, gather)
            out = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
            for rows, part in parts:
                out[rows] = part.attend(query, key_pool, value_pool, rule, gather)
            return out

        return attend

    def _part(
        self, group: Sequence[PackedSequence], window: int | None
    ) -> tuple[slice | torch.Tensor, Segment | PaddedGroup]:
        if len(group) == 1:
            return slice(group[0].start, group[0].stop), self._segment(group[0], window)
        padded = self._padded(group, window)
        return padded.target, padded

    def _segment(self, sequence: PackedSequence, window: int | None) -> Segment:
        num_queries, length, past = sequence.num_queries, sequence.length, sequence.past
        begin = 0 if window is None else max(0, past - window + 1) // self._block_size  # a block
        kv: slice | torch.Tensor
        if sequence.is_contiguous:
            first = sequence.block_ids[0] * self._block_size
            kv = slice(first + begin * self._block_size, first + length)
        else:
            kv = self._tensor(sequence.block_ids[begin:])
        begin *= self._block_size

        def segment(mask: torch.Tensor | None, *, is_folded: bool, is_causal: bool = False) -> Segment:
            return Segment(sequence.start, sequence.stop, kv, length - begin, mask, is_folded, is_causal)

        if sequence.tree is not None or (window is not None and window < length):
            mask = self._additive(self._hidden(sequence, length, window)[:, begin:])
            is_folded = num_queries <= MAX_FOLDED_QUERIES
            return segment(mask.repeat(self._num_groups if is_folded else 1, 1), is_folded=is_folded)
        if num_queries == 1:
            return segment(None, is_folded=True)
        if num_queries <= MAX_FOLDED_QUERIES:
            first = self._max_context - past
            mask = self._strip[:num_queries, first : first + length]
            return segment(mask.repeat(self._num_groups, 1), is_folded=True)
        if past == 0:
            return segment(None, is_folded=False, is_causal=True)
        rows = torch.arange(past, length, device=self._device)[:, None]
        mask = self._additive(torch.arange(length, device=self._device) > rows)
        return segment(mask, is_folded=False)

    def _padded(self, group: Sequence[PackedSequence], window: int | None) -> PaddedGroup:
        num_queries = max(sequence.num_queries for sequence in group)
        tables = self._tensor(pad_tables(group))
        rows: list[int] = []
        positions: list[list[int]] = []
        for sequence in group:
            num_padded = num_queries - sequence.num_queries
            rows += [*sequence.rows, *([sequence.stop - 1] * num_padded)]
            positions.append([*range(sequence.past, sequence.length), *([sequence.length - 1] * num_padded)])
        columns = torch.arange(tables.shape[1] * self._block_size, device=self._device)
        hidden = unseen(columns, self._tensor(positions)[..., None], window)  # [sequences, queries, length]
        for place, sequence in enumerate(group):
            if sequence.tree is not None:
                hidden[place, : sequence.num_queries] = self._hidden(sequence, len(columns), window)
        mask = self._additive(hidden)
        if self._num_groups > 1:
            mask = mask.repeat(1, self._num_groups, 1)
        answered = None
        real = rows
        if any(sequence.num_queries < num_queries for sequence in group):
            is_real = [i < s.num_queries for s in group for i in range(num_queries)]
            answered = self._tensor([i for i, each in enumerate(is_real) if each])
            real = [row for row, each in zip(rows, is_real, strict=True) if each]
        return PaddedGroup(
            row_index(rows, self._device),
            answered,
            row_index(real, self._device),
            tables.flatten(),
            mask[:, None],
        )

    def _hidden(self, sequence: PackedSequence, num_columns: int, window: int | None) -> torch.Tensor:
        """Returns [queries, num_columns]: what a row does not see of its sequence, and after it. A node sees its
        ancestors of the tree alone."""
        columns = torch.arange(num_columns, device=self._device)
        rows = torch.arange(sequence.past, sequence.length, device=self._device)
        if sequence.tree is None:
            return unseen(columns, rows[:, None], window)
        positions = columns.clone()  # a node's is the one that it has on its path
        positions[sequence.past : sequence.length] = self._tensor(sequence.positions)
        hidden = unseen(positions, positions[rows][:, None], window) | (columns > rows[:, None])
        others = ~torch.tensor(sequence.tree.ancestor_mask, device=self._device)
        hidden[-len(others) :, sequence.root : sequence.length] |= others
        return hidden

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def row_index(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    """Returns a slice where the rows follow one another, which costs nothing to take; else their numbers."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def unseen(keys: torch.Tensor, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns whether a row at a position sees no key at another: one that comes after it, or before its window."""
    hidden = keys > rows
    return hidden if window is None else hidden | (keys <= rows - window)
