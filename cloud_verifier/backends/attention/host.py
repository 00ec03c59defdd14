"""Paged attention on a CPU, in float32, by our own kernel (`outrider.kernels.host.attention`).

Importing this module needs numba. A row's bits follow from its own tokens alone. Nothing is padded, so that attention
of eight rows takes less than padded calls of the library; prefill of a long context takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule, PagedAttention
from outrider.cloud_verifier.backends.attention.tiled import TreeRun, split_tree
from outrider.kernels.host.attention import attend_rows
from outrider.kernels.host.threads import Helpers, call_c, helpers
from outrider.kernels.host_layers import at
from outrider.kernels.kv_pool import KVPool

Part = tuple[int, int, int, int]  # first row, rows, tokens, first slot: see `attend_rows`

MIN_SHARED_SCORES = 1 << 9  # of each head that are shared among threads: some 8 us of six heads
PIECE_ROWS = 32  # of a sequence that are one thread's


@dataclass(frozen=True, slots=True)
class HostAttention(PagedAttention):
    """Implements `PagedAttention`. The arrays are `attend_rows`'s."""

    parts: NDArray[np.int64]  # [n, 4]
    slots: NDArray[np.int64]
    helpers: Helpers
    is_shared: bool  # with them

    def __call__(
        self, query: torch.Tensor, key_pool: KVPool, value_pool: KVPool, rule: AttentionRule
    ) -> torch.Tensor:
        queries = query.transpose(0, 1)
        out = queries.new_empty(queries.shape)
        assert queries.stride(2) == 1 and queries.dtype == torch.float32, "a kernel is given addresses alone"
        pools, numbers = (at(key_pool.rows), at(value_pool.rows)), rule_numbers(rule, queries.shape[2])
        arrays = (each.ctypes.data for each in (self.slots, self.parts, numbers))
        strides = (queries.element_size() * stride for stride in queries.stride()[:2])
        sizes = key_pool.num_slots, key_pool.num_kv_heads, self.slots.size, len(self.parts), rule.window or 0
        places = 0, queries.data_ptr(), *pools, *arrays, at(out)
        call = np.array((*places, *queries.shape, *strides, *sizes), np.int64)
        if self.is_shared:
            self.helpers.run(attend_rows.address, call.ctypes.data)
        else:
            call_c(attend_rows, call.ctypes.data)
        return out


def rule_numbers(rule: AttentionRule, head_dim: int) -> NDArray[np.float32]:
    """Returns the scaling and the softcap that `attend_rows` is given, 0 for none."""
    scaling = head_dim**-0.5 if rule.scaling is None else rule.scaling
    return np.array((scaling, rule.softcap or 0.0), np.float32)


class HostPlanner(AttentionPlanner):
    """Implements `AttentionPlanner` with so many threads. Not thread-safe: one plan is used at a time."""

    reads_unwritten = False

    def __init__(self, block_size: int, num_threads: int) -> None:
        self._offsets = np.arange(block_size)
        self._helpers = helpers(num_threads)

    def plan(self, sequences: Sequence[PackedSequence]) -> HostAttention:
        parts, slots, num_slots = list[Part](), list[NDArray[np.int64]](), 0
        block_size = len(self._offsets)
        for each in (part for sequence in sequences for part in split_tree(sequence, block_size)):
            parts.append((each.start, each.num_queries, each.length, num_slots))
            slots.append(self._slots(each))
            num_slots += each.length
        num_scores = sum(map(_num_scores, parts))
        if self._helpers.num_helpers:
            parts = sorted(
                (piece for part in parts for piece in _pieces(part)), key=_num_scores, reverse=True
            )
        is_shared = len(parts) > 1 and num_scores >= MIN_SHARED_SCORES
        return HostAttention(np.array(parts), np.concatenate(slots), self._helpers, is_shared)

    def _slots(self, sequence: PackedSequence) -> NDArray[np.int64]:
        """Returns the slot of each of a sequence's tokens."""
        block_ids = np.array(sequence.block_ids)
        slots = (block_ids[:, None] * len(self._offsets) + self._offsets).ravel()[: sequence.length]
        if isinstance(sequence, TreeRun):
            slots[sequence.path_start :] = sequence.path_slots[: sequence.length - sequence.path_start]
        return slots


def _num_scores(part: Part) -> int:
    _, num_rows, num_tokens, _ = part
    return num_rows * num_tokens


def _pieces(part: Part) -> Iterator[Part]:
    """Yields a part's rows, `PIECE_ROWS` at a time."""
    first_row, num_rows, num_tokens, first_slot = part
    for start in range(0, num_rows, PIECE_ROWS):
        stop = min(start + PIECE_ROWS, num_rows)
        yield first_row + start, stop - start, num_tokens - num_rows + stop, first_slot
