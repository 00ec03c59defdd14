"""Paged attention by our own kernel (`outrider.kernels.paged_attention`): CUDA, or Triton's interpreter.

Importing this module needs Triton. A forward's index is one array of integers, hence one copy to the device
at most, whatever it holds: chains, trees, any lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule, FixedAttention
from outrider.common.models.memory import ATTENTION_PARTS
from outrider.kernels.kv_pool import KVPool
from outrider.kernels.paged_attention import (
    KEYS,
    SPLIT_TOKENS,
    TILE_FIELDS,
    Index,
    Parts,
    attend,
    make_parts,
    num_splits,
    tile_queries,
)

_UNUSED_FIELDS = (0,) * (TILE_FIELDS - 5)


@dataclass(slots=True)
class Tile:
    """Holds queries first … stop − 1 of a sequence, counted from its first query."""

    sequence: PackedSequence
    first: int
    stop: int
    positions: Sequence[int]  # of each query: of a tree's node that on its path

    @property
    def first_row(self) -> int:
        """Returns the packed row of the first query."""
        return self.sequence.start + self.first

    @property
    def stop_row(self) -> int:
        """Returns the packed row after that of the last query."""
        return self.sequence.start + self.stop

    @property
    def paths(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yields (first query of the tile, number of queries, nodes of the last query's path) of each run of nodes.
        The queries before a tree belong to its first run; a tile without nodes has none."""
        tree, num_before = self.sequence.tree, self.sequence.root - self.sequence.past
        if tree is None or self.stop <= num_before:
            return
        for run in tree.runs:
            first = max(self.first, num_before + run.start if run.start else 0)
            stop = min(self.stop, num_before + run.stop)
            if first < stop:
                yield first - self.first, stop - first, tree.path(stop - 1 - num_before)


@dataclass(slots=True)
class KernelAttention(FixedAttention):
    """Holds the launches of a forward, each for a slice of the rows."""

    launches: list[tuple[slice, Index]]
    split_tokens: int
    # Of each launch, in the same memory, from the first layer on.
    parts: list[Parts] = field(default_factory=list)

    def __call__(
        self, query: torch.Tensor, key_pool: KVPool, value_pool: KVPool, rule: AttentionRule
    ) -> torch.Tensor:
        num_heads, num_rows, head_dim = query.shape
        if not self.parts:
            self.parts = make_parts(query, [index for _, index in self.launches])
        out = query.new_empty((num_rows, num_heads, head_dim))
        scaling = head_dim**-0.5 if rule.scaling is None else rule.scaling
        for (rows, index), parts in zip(self.launches, self.parts, strict=True):
            layer = query[:, rows], key_pool, value_pool
            attend(*layer, index, parts, out[rows], scaling, rule.window, rule.softcap, self.split_tokens)
        return out

    @property
    def fixed(self) -> tuple[int, ...] | None:
        if len(self.launches) > 1:
            return None
        _, index = self.launches[0]
        return index.num_rows, index.num_tiles, index.num_splits, index.values.data_ptr()

    def again(self) -> KernelAttention:
        return KernelAttention(self.launches, self.split_tokens)


class PagedPlanner(AttentionPlanner):
    """Implements `AttentionPlanner`: a row's bits depend on no other row, and on no length but its own."""

    reads_unwritten = False

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        device: torch.device,
        split_tokens: int = SPLIT_TOKENS,
        upload: Callable[[NDArray[np.int32]], torch.Tensor] | None = None,
    ) -> None:
        """`upload` returns an array on the device, to be read after the plan is made."""
        self._block_size = block_size
        self._tile_queries = tile_queries(num_groups)
        self._split_tokens = split_tokens
        self._upload = upload or partial(torch.tensor, device=device)

    def plan(self, sequences: Sequence[PackedSequence]) -> KernelAttention:
        launches = [
            (slice(tiles[0].first_row, tiles[-1].stop_row), self._index(tiles))
            for tiles in self._launches(sequences)
        ]
        return KernelAttention(launches, self._split_tokens)

    def _launches(self, sequences: Sequence[PackedSequence]) -> Iterator[list[Tile]]:
        """Yields the tiles of each launch, in packed order: one for all rows, unless there are very many."""
        tiles: list[Tile] = []
        most_splits = 1
        for sequence in sequences:
            positions = sequence.positions
            own_splits = _bucket(num_splits(sequence.length, self._split_tokens))
            most_queries = max(1, min(self._tile_queries, ATTENTION_PARTS // own_splits))
            for first in range(0, sequence.num_queries, most_queries):
                stop = min(first + most_queries, sequence.num_queries)
                tile = Tile(sequence, first, stop, positions[first:stop])
                wanted = max(most_splits, own_splits)
                if tiles and (tile.stop_row - tiles[0].first_row) * wanted > ATTENTION_PARTS:
                    yield tiles
                    tiles, wanted = [], own_splits
                tiles.append(tile)
                most_splits = wanted
        if tiles:
            yield tiles

    def _index(self, tiles: Sequence[Tile]) -> Index:
        first_row, num_tiles, stop = tiles[0].first_row, _bucket(len(tiles)), 0
        values = array("i", bytes(4 * TILE_FIELDS * num_tiles))
        for tile in tiles:
            values.extend(tile.positions)
        fields, table, last = list[int](), 0, None
        for tile in tiles:
            if tile.sequence is not last:
                table, last = len(values), tile.sequence
                values.extend(last.block_ids[: -(-last.length // self._block_size)])
            tile_stop = 1 + (max(tile.positions) if last.tree else tile.positions[-1])
            stop = max(stop, tile_stop)
            runs = self._runs(values, tile, table, tile_stop)
            fields += (tile.first_row - first_row, tile.stop - tile.first, tile_stop, len(values), len(runs))
            fields += _UNUSED_FIELDS
            for run in runs:
                values.extend(run)
        values[: len(fields)] = array("i", fields)
        return Index(
            values=self._upload(np.frombuffer(values, np.int32)),
            num_rows=tiles[-1].stop_row - first_row,
            num_tiles=num_tiles,
            num_splits=_bucket(num_splits(stop, self._split_tokens)),
        )

    def _runs(self, values: array[int], tile: Tile, table: int, stop: int) -> list[tuple[int, ...]]:
        """Returns the runs of a tile, field by field; the slots of paths are appended to `values`."""
        sequence, size = tile.sequence, self._block_size
        paths = list(tile.paths) if sequence.tree else []
        shared_stop = sequence.root // KEYS * KEYS if paths else stop
        runs: list[tuple[int, ...]] = [(0, tile.stop - tile.first, 0, shared_stop, table, size)]
        for first, num_queries, path in paths:
            places = [*range(shared_stop, sequence.root), *(sequence.root + node for node in path)]
            runs.append((first, num_queries, shared_stop, sequence.root + len(path), len(values), 1))
            values.extend([sequence.block_ids[place // size] * size + place % size for place in places])
        return runs


def _bucket(count: int) -> int:
    """Returns the next power of two: the grid has few sizes, so that few graphs of a step would be captured."""
    return 1 << (count - 1).bit_length()
