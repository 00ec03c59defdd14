"""Paged attention in tiles of one shape: a row's bits do not depend on the rows or sequences beside it.

The library's attention sums in an order that depends on how many queries and keys one call has. Here a call's
shape follows from a row's own position alone: a tile has a fixed number of queries, and its keys are padded to
the end of the span that its positions are in. Any number of tiles of one span are one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outrider.cloud_verifier.backends.attention.packing import MAX_BATCHED_LENGTH, PackedSequence
from outrider.cloud_verifier.backends.attention.plan import (
    AttentionPlanner,
    AttentionRule,
    PagedAttention,
    softmax_attention,
)
from outrider.cloud_verifier.backends.attention.sdpa import BlockGatherer, row_index, unseen
from outrider.kernels.kv_pool import KVPool

# Query heads that share a key head are rows of one product; at least this many fill its kernel.
TILE_ROWS = 16
SPANS = (64, 128, 256, 512)  # ends of spans of positions; beyond the last they are multiples of it
MAX_GATHERED_TOKENS = 1 << 14  # of one call, where it has several tiles


def span_end(position: int) -> int:
    """Returns the number of keys with which a row at `position` attends, padding included."""
    for end in SPANS:
        if position < end:
            return end
    return (position // SPANS[-1] + 1) * SPANS[-1]


@dataclass(slots=True)
class TreeRun(PackedSequence):
    """Holds nodes of a tree of which each is the parent of the next, as a sequence: positions as on their path.

    Its blocks have other nodes in the places of the path's: `path_slots` are where these are, from `path_start` on.
    """

    path_start: int = 0
    path_slots: Sequence[int] = ()


def split_tree(sequence: PackedSequence, block_size: int) -> Iterator[PackedSequence]:
    """Yields what comes before a sequence's tree, then the runs of the tree: as many as it has leaves."""
    tree, root, block_ids = sequence.tree, sequence.root, sequence.block_ids
    if tree is None:
        yield sequence
        return
    first_row = sequence.stop - len(tree)
    if first_row > sequence.start:
        num_blocks = -(-root // block_size)
        is_run = sequence.is_contiguous
        yield PackedSequence(sequence.start, first_row - sequence.start, root, block_ids[:num_blocks], is_run)
    for run in tree.runs:
        path = [*tree.path(tree.parents[run[0]]), *run]
        slots = [block_ids[i // block_size] * block_size + i % block_size for i in (root + n for n in path)]
        yield TreeRun(
            first_row + run[0],
            len(run),
            root + len(path),
            block_ids,
            path_start=root,
            path_slots=slots,
        )


@dataclass(slots=True)
class Tile:
    """Holds consecutive queries of one sequence in one span: rows start … start + num_queries − 1."""

    sequence: PackedSequence
    start: int
    num_queries: int
    position: int  # of the first query


def split_tiles(sequence: PackedSequence, num_queries: int) -> Iterator[tuple[int, Tile]]:
    """Yields a sequence's tiles of at most `num_queries` queries, each with the end of its span."""
    position = sequence.past
    while position < sequence.length:
        end = span_end(position)
        count = min(num_queries, end - position, sequence.length - position)
        yield end, Tile(sequence, sequence.start + position - sequence.past, count, position)
        position += count


@dataclass(slots=True)
class TileCall:
    """Holds tiles of one span that attend in one call."""

    rows: torch.Tensor  # [num_tiles * tile_queries]: packed rows, padding included
    answered: slice | torch.Tensor  # the places of the real ones in it
    target: slice | torch.Tensor  # the packed rows that these are
    kv: slice | torch.Tensor  # a run of slots, or blocks to gather: each tile's, or one sequence's for all
    # Places among the gathered tokens, and the slots to copy there.
    moved: tuple[torch.Tensor, torch.Tensor] | None
    positions: torch.Tensor  # [num_tiles * tile_queries]
    span: int
    num_tiles: int
    num_groups: int  # query heads that share a key head
    dtype: torch.dtype
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window

    def attend(
        self,
        query: torch.Tensor,
        key_pool: KVPool,
        value_pool: KVPool,
        rule: AttentionRule,
        gather: BlockGatherer,
    ) -> torch.Tensor:
        """Returns [answered rows, heads, head_dim] for queries [heads, rows, head_dim]."""
        mask = self._mask(rule.window)
        num_tiles, _, num_folded, span = mask.shape
        num_heads, _, head_dim = query.shape
        keys, values = (
            self._tokens(pool, span, gather, which).expand(num_tiles, -1, -1, -1)
            for which, pool in enumerate((key_pool, value_pool))
        )  # [num_tiles, kv_heads, span, head_dim]
        num_kv_heads = keys.shape[1]
        query = query.index_select(1, self.rows)
        folded = query.view(num_kv_heads, num_heads // num_kv_heads, num_tiles, -1, head_dim)
        folded = folded.permute(2, 0, 1, 3, 4).reshape(num_tiles, num_kv_heads, num_folded, head_dim)
        out = softmax_attention(folded, keys, values, rule, mask)
        out = out.reshape(num_tiles, num_heads, -1, head_dim).transpose(1, 2).flatten(0, 1)
        return out[self.answered]

    def _tokens(self, pool: KVPool, span: int, gather: BlockGatherer, which: int) -> torch.Tensor:
        if isinstance(self.kv, slice):
            tokens = pool.read(self.kv)[None]
        else:
            tokens = gather(pool, self.kv, which)
            if self.moved is not None:
                places, slots = self.moved
                tokens.index_copy_(0, places, pool.read(slots))
            tokens = tokens.view(-1, self._gathered(span, pool.block_size), *tokens.shape[1:])[:, :span]
        return tokens.transpose(1, 2)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Returns an additive mask [num_tiles, 1, num_groups * tile_queries, span]."""
        if window is not None and window >= self.span:
            window = None
        if (mask := self.masks.get(window)) is None:
            keys = torch.arange(self.span, device=self.positions.device)
            hidden = unseen(keys, self.positions[:, None], window)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, float("-inf")).view(self.num_tiles, 1, -1, self.span)
            self.masks[window] = mask = mask.repeat(1, 1, self.num_groups, 1)
        return mask

    @staticmethod
    def _gathered(span: int, block_size: int) -> int:
        return -(-span // block_size) * block_size


class TiledPlanner(AttentionPlanner):
    """Implements `AttentionPlanner`. Not thread-safe: one plan is used at a time."""

    def __init__(self, block_size: int, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._num_queries = -(-TILE_ROWS // num_groups)
        self._dtype = dtype
        self._device = device
        self._gather = BlockGatherer()

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        calls = [self._call(end, tiles) for end, tiles in self._groups(sequences)]
        gather = self._gather

        def attend(
            query: torch.Tensor, key_pool: KVPool, value_pool: KVPool, rule: AttentionRule
        ) -> torch.Tensor:
            if len(calls) == 1:  # its target is every row, in order
                return calls[0].attend(query, key_pool, value_pool, rule, gather)
            out = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
            for call in calls:
                out[call.target] = call.attend(query, key_pool, value_pool, rule, gather)
            return out

        return attend

    def _groups(self, sequences: Sequence[PackedSequence]) -> list[tuple[int, list[Tile]]]:
        """Returns the tiles of each call: single tiles of a short span together, others by sequence."""
        singles: defaultdict[int, list[Tile]] = defaultdict(list)
        groups: list[tuple[int, list[Tile]]] = []
        for sequence in (part for each in sequences for part in split_tree(each, self._block_size)):
            spans: defaultdict[int, list[Tile]] = defaultdict(list)
            for end, tile in split_tiles(sequence, self._num_queries):
                spans[end].append(tile)
            for end, tiles in spans.items():
                is_gathered = isinstance(sequence, TreeRun)
                if len(tiles) == 1 and (end <= MAX_BATCHED_LENGTH or is_gathered):
                    singles[end] += tiles
                else:
                    groups.append((end, tiles))
        for end, tiles in singles.items():
            most = max(1, MAX_GATHERED_TOKENS // end)
            groups += [(end, tiles[first : first + most]) for first in range(0, len(tiles), most)]
        return groups

    def _call(self, end: int, tiles: Sequence[Tile]) -> TileCall:
        rows, positions, answered = [], [], []
        for number, tile in enumerate(tiles):
            for place in range(self._num_queries):
                query = min(place, tile.num_queries - 1)
                rows.append(tile.start + query)
                positions.append(tile.position + query)
                if query == place:
                    answered.append(number * self._num_queries + place)
        gathered = [tiles[0].sequence]
        if gathered[0] is not tiles[-1].sequence:
            gathered = [tile.sequence for tile in tiles]
        kv = self._kv(end, gathered)
        return TileCall(
            rows=self._tensor(rows),
            answered=row_index(answered, self._device),
            target=row_index([rows[place] for place in answered], self._device),
            kv=kv,
            moved=self._moved(end, gathered),
            positions=self._tensor(positions),
            span=end,
            num_tiles=len(tiles),
            num_groups=self._num_groups,
            dtype=self._dtype,
        )

    def _kv(self, end: int, sequences: Sequence[PackedSequence]) -> slice | torch.Tensor:
        """Returns a slice where the whole span is in the one sequence's own run of blocks: no copy is needed."""
        sequence = sequences[0]
        if (
            len(sequences) == 1
            and sequence.is_contiguous
            and len(sequence.block_ids) * self._block_size >= end
        ):
            first = sequence.block_ids[0] * self._block_size
            return slice(first, first + end)
        return self._tensor([block for each in sequences for block in self._blocks(end, each)])

    def _moved(
        self, end: int, sequences: Sequence[PackedSequence]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns where tokens of paths belong among the gathered ones, and their slots."""
        num_gathered = -(-end // self._block_size) * self._block_size
        places, slots = list[int](), list[int]()
        for number, sequence in enumerate(sequences):
            if isinstance(sequence, TreeRun):
                stop = min(end, sequence.length)
                places += range(number * num_gathered + sequence.path_start, number * num_gathered + stop)
                slots += sequence.path_slots[: max(0, stop - sequence.path_start)]
        return (self._tensor(places), self._tensor(slots)) if places else None

    def _blocks(self, end: int, sequence: PackedSequence) -> list[int]:
        """Returns the blocks of a span, the sequence's own last one in place of those it lacks."""
        num_blocks = -(-end // self._block_size)
        own = list(sequence.block_ids[:num_blocks])
        return own + own[-1:] * (num_blocks - len(own))

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
