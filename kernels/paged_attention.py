"""Attention over a paged KV pool for CUDA, in Triton: the chains and trees of a step in two launches a layer.

A tile is some consecutive queries of one sequence, with all query heads that share a KV head as rows of one
product. A program attends with one tile, for one KV head, over one split: `split_tokens` positions, counted from
position 0 of the sequence, the first ones of half as many (`early_tokens`): a step of few short sequences has few
programs, and waits for the longest. The second launch adds each query's splits up, in order. Every product has the same
shape, and keys that a row does not see add exact zeros to it. So a row's bits follow from the row, its keys and
their positions alone: not from the queries beside it, other sequences, or where in the pool blocks lie.

A run is some queries of a tile that find their keys in one place: those of a chain all of them, by the block table. A
node of a tree sees the keys of its path in place of those at its positions. So a tree's tile has a run for what
comes before the tree, up to a multiple of `KEYS`, and one for each path, which lists the slots of its keys from
there on and adds them to its own rows alone. So a path has the bits of the chain that it is.

All lengths are in `Index.values`, on the device; the host gives the grid alone, and the memory between the launches.
Keys, warps and stages are those that took the least time of 20 choices on an H100 (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.device_fp8 import decode
from outrider.kernels.kv_pool import KVPool

SPLIT_TOKENS = 512
KEYS = 64  # of one product, and half as many in float32, which has no registers for more
NUM_STAGES = 2  # products for which keys and values are under way at once
MIN_TILE_ROWS = 64  # of one product: the fewest that Hopper's tensor cores take
# first_row, num_queries, stop (of the keys), where its runs begin in the index, num_runs; three are unused
TILE_FIELDS = 8
# first_query (of the tile), num_queries, first_key, stop (of the keys), where their entries begin in the index, keys
# an entry: entries are blocks of so many slots, or single slots
RUN_FIELDS = 6
_TILE_FIELDS, _RUN_FIELDS = tl.constexpr(TILE_FIELDS), tl.constexpr(RUN_FIELDS)
_LOG2_E = 1.4426950408889634
NO_WINDOW = 2**30
_NO_WINDOW = tl.constexpr(NO_WINDOW)
_MOST_BITS = tl.constexpr(60.0)  # beyond it tanh is 1 in float32


@triton.jit  # type: ignore[untyped-decorator]
def _split_start(split, EARLY: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first position of a split."""
    num_early = SPLIT // EARLY
    return tl.minimum(split, num_early) * EARLY + tl.maximum(split - num_early, 0) * SPLIT


@triton.jit  # type: ignore[untyped-decorator]
def _split_of(position, EARLY: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the split of a position."""
    return tl.minimum(position, SPLIT) // EARLY + tl.maximum(position - SPLIT, 0) // SPLIT


@triton.jit  # type: ignore[untyped-decorator]
def product(left, right, IS_INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns left @ right in float32. numpy's product, the interpreter's, has other last bits for other rows of
    one matrix and knows no bfloat16: in float64 it does, and its rounded sums are right."""
    if IS_INTERPRETED:
        return tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _add_keys(  # type: ignore[no-untyped-def]
    top, total, summed, queries, key_pool, value_pool, key_scales, value_scales, places, is_key, is_seen, scale, cap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Adds the keys in `places` [KEYS] of the pool's heads to each row's (top, total, summed), where `is_seen`
    [rows, KEYS]."""
    keys = _load_heads(key_pool, key_scales, places, is_key, queries.dtype, HEAD_DIM, PADDED_DIM, HAS_SCALES)
    scores = product(queries, tl.trans(keys), IS_INTERPRETED) * scale
    if HAS_SOFTCAP:  # cap · tanh, where `scale` makes the scores twice tanh's argument, in bits
        scores = cap * (1.0 - 2.0 / (tl.exp2(tl.minimum(scores, _MOST_BITS)) + 1.0))
    scores = tl.where(is_seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    zero = tl.where(new_top == -float("inf"), 0.0, new_top)
    values = _load_heads(
        value_pool, value_scales, places, is_key, queries.dtype, HEAD_DIM, PADDED_DIM, HAS_SCALES
    )
    weights = tl.exp2(scores - zero[:, None]).to(values.dtype)
    rescale = tl.exp2(top - zero)
    summed = summed * rescale[:, None] + product(weights, values, IS_INTERPRETED)
    # The rounded weights are added up: they are what the values are multiplied by.
    return new_top, total * rescale + tl.sum(weights.to(tl.float32), 1), summed


@triton.jit  # type: ignore[untyped-decorator]
def _load_heads(  # type: ignore[no-untyped-def]
    pool, scales, places, is_key, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Returns [KEYS, PADDED_DIM] from these places among the pool's heads."""
    dims = tl.arange(0, PADDED_DIM)
    is_read = is_key[:, None] & (dims < HEAD_DIM)[None, :]
    heads = tl.load(pool + places[:, None] * HEAD_DIM + dims[None, :], mask=is_read, other=0)
    if HAS_SCALES:
        scale = tl.load(scales + places, mask=is_key, other=0.0)
        heads = decode(heads, scale[:, None]).to(dtype)
    return heads


@triton.jit(do_not_specialize=["head_stride", "row_stride", "window"])  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    query, head_stride, row_stride, key_pool, value_pool, key_scales, value_scales, index, positions,
    scale, cap, window, tops, totals, sums,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr, SPLIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Runs program (tile, KV head, split)."""
    tile = index + tl.program_id(0) * _TILE_FIELDS
    kv_head, split = tl.program_id(1), tl.program_id(2)
    first_row, num_queries = tl.load(tile), tl.load(tile + 1)
    split_start, split_stop = _split_start(split, EARLY, SPLIT), _split_start(split + 1, EARLY, SPLIT)
    if split_start >= tl.load(tile + 2):
        return
    row = tl.arange(0, TILE_ROWS)
    place, head = row // NUM_GROUPS, kv_head * NUM_GROUPS + row % NUM_GROUPS
    is_query = place < num_queries
    position = tl.load(positions + first_row + place, mask=is_query, other=-1)
    lowest = tl.min(tl.where(is_query, position, _NO_WINDOW))
    first_seen = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
    if split_stop <= first_seen:
        return
    dims = tl.arange(0, PADDED_DIM)
    at = head.to(tl.int64) * head_stride + (first_row + place).to(tl.int64) * row_stride
    is_read = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + at[:, None] + dims[None, :], mask=is_read, other=0.0)
    top = tl.full((TILE_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    summed = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
    run = index + tl.load(tile + 3)
    for _ in range(tl.load(tile + 4)):
        first_query, run_queries = tl.load(run), tl.load(run + 1)
        first_key, run_stop = tl.load(run + 2), tl.load(run + 3)
        entries, entry_keys = index + tl.load(run + 4), tl.load(run + 5)
        sees_until = tl.where((place >= first_query) & (place < first_query + run_queries), position, -1)
        stop = tl.minimum(split_stop, run_stop)
        for start in range(tl.maximum(tl.maximum(split_start, first_seen), first_key), stop, KEYS):
            key = start + tl.arange(0, KEYS)
            is_key = key < stop
            entry = tl.load(entries + (key - first_key) // entry_keys, mask=is_key, other=0)
            slots = entry * entry_keys + (key - first_key) % entry_keys
            places = slots.to(tl.int64) * NUM_KV_HEADS + kv_head
            is_seen = is_key[None, :] & (key[None, :] <= sees_until[:, None])
            is_seen = is_seen & (key[None, :] > (position - window)[:, None])
            top, total, summed = _add_keys(
                top, total, summed, queries, key_pool, value_pool, key_scales, value_scales, places, is_key, is_seen,
                scale, cap, HEAD_DIM, PADDED_DIM, HAS_SOFTCAP, HAS_SCALES, IS_INTERPRETED,
            )  # fmt: skip
        run += _RUN_FIELDS

    part = ((first_row + place) * tl.num_programs(2) + split) * (NUM_KV_HEADS * NUM_GROUPS) + head
    tl.store(tops + part, top, mask=is_query)
    tl.store(totals + part, total, mask=is_query)
    tl.store(sums + part[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_read)


@triton.jit(do_not_specialize=["num_splits", "window"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    positions, num_splits, window, tops, totals, sums, out,
    NUM_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    EARLY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Runs program (row, KV head): a row has the splits from its window's to its own, whatever `num_splits` is."""
    row, num_heads = tl.program_id(0), tl.num_programs(1) * NUM_GROUPS
    group, dims = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_DIM)
    head = tl.program_id(1) * NUM_GROUPS + group
    is_head = group < NUM_GROUPS
    is_read = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    top = tl.full((PADDED_GROUPS,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED_GROUPS,), tl.float32)
    summed = tl.zeros((PADDED_GROUPS, PADDED_DIM), tl.float32)
    position = tl.load(positions + row)
    first = _split_of(tl.maximum(position - window + 1, 0), EARLY, SPLIT)
    for split in range(first, _split_of(position, EARLY, SPLIT) + 1):
        part = (row * num_splits + split) * num_heads + head
        part_top = tl.load(tops + part, mask=is_head, other=0.0)
        new_top = tl.maximum(top, part_top)
        rescale, share = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * rescale + tl.load(totals + part, mask=is_head, other=1.0) * share
        added = tl.load(sums + part[:, None] * HEAD_DIM + dims[None, :], mask=is_read, other=0.0)
        summed = summed * rescale[:, None] + added * share[:, None]
        top = new_top
    at = (row * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + at, (summed / total[:, None]).to(out.dtype.element_ty), mask=is_read)


def tile_queries(num_groups: int) -> int:
    """Returns the most queries of a tile, where `num_groups` query heads share a KV head."""
    return max(1, MIN_TILE_ROWS // num_groups)


def early_tokens(split_tokens: int) -> int:
    """Returns the positions of a split among the first `split_tokens`."""
    return max(KEYS, split_tokens // 2)


def num_splits(length: int, split_tokens: int) -> int:
    """Returns the splits of a sequence of `length` positions, at least one."""
    last = length - 1
    num_early = min(last, split_tokens) // early_tokens(split_tokens)
    return num_early + max(last - split_tokens, 0) // split_tokens + 1


@dataclass(slots=True)
class Index:
    """Holds where a forward's rows find their keys: what `attend` needs besides the tensors of a layer."""

    # int32: tiles [num_tiles, TILE_FIELDS], positions [num_rows], and what tiles refer to.
    values: torch.Tensor
    num_rows: int
    num_tiles: int  # of the grid; those that are all zeros do nothing
    num_splits: int  # at least those of the longest sequence

    @property
    def positions(self) -> torch.Tensor:
        """Returns the position of each row, and what follows: int32."""
        return self.values[self.num_tiles * TILE_FIELDS :]


@dataclass(slots=True)
class Parts:
    """Holds what each split adds to each head of each row, between the two launches."""

    tops: torch.Tensor  # float32 [num_rows, num_splits, heads], of scores in bits
    totals: torch.Tensor  # the same: sums of weights
    sums: torch.Tensor  # float32 [num_rows, num_splits, heads, head_dim]: sums of weighted values


def make_parts(query: torch.Tensor, indices: Sequence[Index]) -> list[Parts]:
    """Returns memory for queries [heads, rows, head_dim] of launches that follow one another, one for each index: all
    are the same memory, of which the largest takes everything. Any layer of a forward can use it after another."""
    num_heads, _, head_dim = query.shape
    num_parts = max(index.num_rows * index.num_splits for index in indices) * num_heads
    tops, totals = query.new_empty((2, num_parts), dtype=torch.float32)
    sums = query.new_empty((num_parts, head_dim), dtype=torch.float32)
    parts = []
    for index in indices:
        shape = index.num_rows, index.num_splits, num_heads
        views = (each[: math.prod(shape)].view(*shape, *each.shape[1:]) for each in (tops, totals, sums))
        parts.append(Parts(*views))
    return parts


def attend(
    query: torch.Tensor,
    key_pool: KVPool,
    value_pool: KVPool,
    index: Index,
    parts: Parts,
    out: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Writes the attention of queries [heads, num_rows, head_dim] to `out` [num_rows, heads, head_dim].

    Rows of the pools are contiguous; all are float32, bfloat16 or float16 alike, rows with scales excepted; the query's
    last dimension is contiguous. A row sees `window` tokens, itself the last of them (None: all
    before it); with a `softcap` c a score s counts as c · tanh(s / c). `split_tokens` is `KEYS` times a power of two.
    """
    num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key_pool.num_kv_heads
    (keys, key_scales), (values, value_scales) = key_pool.operands, value_pool.operands
    assert query.stride(2) == 1 and keys.is_contiguous() and values.is_contiguous(), "other strides"
    early = early_tokens(split_tokens)
    assert split_tokens % early == early % KEYS == 0, f"splits of {split_tokens} tokens"
    num_groups = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    tile_rows = max(MIN_TILE_ROWS, triton.next_power_of_2(num_groups))
    positions, window = index.positions, window or NO_WINDOW
    scale, cap = (scaling, 0.0) if softcap is None else (2 * scaling / softcap, softcap)
    # Triton launches on the current device, wherever its tensors are.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _attend_split[(index.num_tiles, num_kv_heads, index.num_splits)](
            query, query.stride(0), query.stride(1), keys, values, key_scales, value_scales,
            index.values, positions, scale * _LOG2_E, cap * _LOG2_E, window, parts.tops, parts.totals, parts.sums,
            NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_groups, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
            TILE_ROWS=tile_rows, KEYS=num_keys(query.dtype), EARLY=early, SPLIT=split_tokens,
            HAS_SOFTCAP=softcap is not None,
            HAS_SCALES=key_pool.scales is not None, IS_INTERPRETED=not isinstance(_attend_split, triton.JITFunction),
            num_warps=num_warps(query.dtype), num_stages=NUM_STAGES, enable_fp_fusion=True,
        )  # fmt: skip
        _combine[(num_rows, num_kv_heads)](
            positions, index.num_splits, window, parts.tops, parts.totals, parts.sums, out,
            NUM_GROUPS=num_groups, PADDED_GROUPS=triton.next_power_of_2(num_groups),
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, EARLY=early, SPLIT=split_tokens, enable_fp_fusion=True,
        )  # fmt: skip


def num_keys(dtype: torch.dtype) -> int:
    """Returns the keys of a product."""
    return KEYS // 2 if dtype == torch.float32 else KEYS


def num_warps(dtype: torch.dtype) -> int:
    """Returns the warps of a tile: products in float32 keep their operands in registers."""
    return 8 if dtype == torch.float32 else 4
