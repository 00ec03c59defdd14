"""A packed forward as integers: its rows, slots and groups of sequences padded together. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.common.tree import Tree

# Attention over several short sequences is padded into one call; longer ones cost more padded than alone.
MAX_BATCHED_QUERIES = 16
MAX_BATCHED_LENGTH = 256
MAX_PADDING = 1.5  # padded work : real work
GATHER_ROWS = 4  # gathering a token's keys and values costs about as much as this many queries over them


@dataclass(slots=True)  # not frozen: see RoundMetrics
class PackedSequence:
    """Holds one sequence's part of a packed forward: rows start … start + num_queries − 1."""

    start: int
    num_queries: int
    length: int  # tokens in KV, the queries' own included
    block_ids: Sequence[int]
    is_contiguous: bool = False
    tree: Tree | None = None  # the last queries, where they are one

    @property
    def past(self) -> int:
        """Returns the number of tokens in KV before the queries."""
        return self.length - self.num_queries

    @property
    def root(self) -> int:
        """Returns the number of tokens in KV before its tree: all where it has none."""
        return self.length - (len(self.tree) if self.tree else 0)

    @property
    def positions(self) -> Sequence[int]:
        """Returns the position of each query."""
        return row_positions(self.past, self.num_queries, self.tree)

    @property
    def stop(self) -> int:
        """Returns the row after the last."""
        return self.start + self.num_queries

    @property
    def rows(self) -> range:
        """Returns the rows as a range."""
        return range(self.start, self.stop)


def row_positions(past: int, num_rows: int, tree: Tree | None) -> Sequence[int]:
    """Returns the positions of rows after `past` tokens of a sequence; of the nodes of a tree, which are the last
    rows, those on their paths."""
    if tree is None:
        return range(past, past + num_rows)
    root = past + num_rows - len(tree)
    return [*range(past, root), *(root + depth for depth in tree.depths)]


def pad_tables(sequences: Sequence[PackedSequence]) -> list[list[int]]:
    """Returns block ids [num_sequences, max_blocks], each padded with its own last block: what attention masks
    may be multiplied by zero, and NaN of another sequence would pass."""
    num_blocks = max(len(sequence.block_ids) for sequence in sequences)
    return [[*s.block_ids, *[s.block_ids[-1]] * (num_blocks - len(s.block_ids))] for s in sequences]


def group_similar(sequences: Sequence[PackedSequence]) -> list[list[PackedSequence]]:
    """Returns groups of sequences to attend together, each in packed order; longer ones are groups of one."""
    short, groups = [], []
    for sequence in sequences:
        if sequence.num_queries <= MAX_BATCHED_QUERIES and sequence.length <= MAX_BATCHED_LENGTH:
            short.append(sequence)
        else:
            groups.append([sequence])
    short.sort(key=lambda sequence: -sequence.length)
    group: list[PackedSequence] = []
    for sequence in short:
        if group and _padding([*group, sequence]) > MAX_PADDING:
            groups.append(group)
            group = []
        group.append(sequence)
    if group:
        groups.append(group)
    return [sorted(each, key=lambda sequence: sequence.start) for each in groups]


def _padding(group: Sequence[PackedSequence]) -> float:
    num_rows = max(sequence.num_queries for sequence in group) + GATHER_ROWS
    length = max(sequence.length for sequence in group)
    real = sum((sequence.num_queries + GATHER_ROWS) * sequence.length for sequence in group)
    return len(group) * num_rows * length / real
