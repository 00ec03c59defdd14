"""Attention over the paged KV pool on a CPU, in float32: a row's bits depend on no other row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit
from outrider.kernels.host.exp import fill_exps, max_or_nan, sum_up

_TILE = 16  # rows of a sequence that share what is read
_CHUNK = 64  # keys that are turned over at a time
_STEP = 8  # summands between which a sum stays in a register
_TENSOR = types.float32[:, :, ::1]
_NUMBERS = types.int64[::1]


@jit(fastmath={"contract"})
def _add_products(factors: Any, rows: Any, out: Any) -> None:
    """Adds rows [n, at least out.size] to `out`, each by its factor, one after another.

    A product and its addition are rounded once where the processor can (FMA).
    """
    whole = factors.size - factors.size % _STEP
    for i in range(0, whole, _STEP):
        f0, f1, f2, f3 = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        f4, f5, f6, f7 = factors[i + 4], factors[i + 5], factors[i + 6], factors[i + 7]
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        r4, r5, r6, r7 = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        for j in range(out.size):
            total = out[j] + f0 * r0[j]
            total += f1 * r1[j]
            total += f2 * r2[j]
            total += f3 * r3[j]
            total += f4 * r4[j]
            total += f5 * r5[j]
            total += f6 * r6[j]
            out[j] = total + f7 * r7[j]
    for i in range(whole, factors.size):
        factor, row = factors[i], rows[i]
        for j in range(out.size):
            out[j] += factor * row[j]


@jit(fastmath={"contract"})
def _fill_scores(
    queries: Any, keys: Any, kv_head: Any, places: Any, begin: Any, scaling: Any, turned: Any, scores: Any
) -> None:
    """Fills scores [rows, groups, tokens] of a KV head from the token `begin` on: scaled products with its keys."""
    num_groups = scores.shape[1]
    for start in range(begin, places.size, _CHUNK):
        stop = min(start + _CHUNK, places.size)
        for i in range(stop - start):
            key = keys[places[start + i], kv_head]
            for d in range(key.size):
                turned[d, i] = key[d]
        for row in range(queries.shape[0]):
            for group in range(num_groups):
                mine = scores[row, group, start:stop]
                for i in range(mine.size):
                    mine[i] = 0
                _add_products(queries[row, kv_head * num_groups + group], turned, mine)
                for i in range(mine.size):
                    mine[i] *= scaling


@jit()
def _fill_weights(scores: Any, softcap: Any, weights: Any) -> Any:
    """Fills `weights` with exp(score - the largest score), NaN where that is not finite, and returns their sum."""
    if softcap > 0:
        for i in range(scores.size):
            scores[i] = softcap * np.tanh(scores[i] / softcap)
    top = max_or_nan(scores)
    if np.isfinite(top):
        fill_exps(scores, top, np.float32(1), -np.inf, weights)
    else:
        for i in range(weights.size):
            weights[i] = np.nan
    return sum_up(weights)


@jit()
def _first_seen(stop: Any, window: Any) -> Any:
    """Returns the first token that a row attends over whose own is the last before `stop`."""
    return max(0, stop - window) if window else 0


@jit(
    types.void(
        _TENSOR,
        _TENSOR,
        _TENSOR,
        _NUMBERS,
        types.int64[:, ::1],
        types.int64,
        types.float32,
        types.float32,
        _TENSOR,
    )
)
def attend_rows(
    queries: Any,
    keys: Any,
    values: Any,
    slots: Any,
    sequences: Any,
    window: Any,
    scaling: Any,
    softcap: Any,
    out: Any,
) -> None:
    """Writes the attention of queries [rows, heads, head_dim] to `out`, of their shape.

    Sequences are (first row, rows, tokens, first slot): its rows are the last of its tokens, whose keys and values
    [kv_heads, head_dim] are in `slots`, one for each token from the first slot on. A row attends over the tokens up to
    its own, the last `window` of them where that is not 0.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    num_groups = queries.shape[1] // num_kv_heads
    most_tokens = 0
    for number in range(sequences.shape[0]):
        most_tokens = max(most_tokens, sequences[number, 2])
    scores = np.empty((_TILE, num_groups, most_tokens), np.float32)
    weights = np.empty((_TILE, num_groups, most_tokens), np.float32)
    sums = np.empty((_TILE, num_groups), np.float32)
    turned = np.empty((head_dim, _CHUNK), np.float32)
    chunk = np.empty((_CHUNK, head_dim), np.float32)
    for number in range(sequences.shape[0]):
        first_row, num_rows, num_tokens, first_slot = sequences[number]
        for tile in range(0, num_rows, _TILE):
            in_tile = min(_TILE, num_rows - tile)
            first = first_row + tile
            mine, answers = queries[first : first + in_tile], out[first : first + in_tile]
            first_stop = num_tokens - num_rows + tile + 1  # tokens up to that of the tile's first row
            places = slots[first_slot : first_slot + first_stop + in_tile - 1]
            begin = _first_seen(first_stop, window)
            for kv_head in range(num_kv_heads):
                head = kv_head * num_groups
                _fill_scores(mine, keys, kv_head, places, begin, scaling, turned, scores)
                for row in range(in_tile):
                    stop = first_stop + row
                    seen = slice(_first_seen(stop, window), stop)
                    for group in range(num_groups):
                        sums[row, group] = _fill_weights(
                            scores[row, group, seen], softcap, weights[row, group, seen]
                        )
                        for d in range(head_dim):
                            answers[row, head + group, d] = 0
                for start in range(begin, places.size, _CHUNK):
                    in_chunk = min(_CHUNK, places.size - start)
                    for i in range(in_chunk):
                        value = values[places[start + i], kv_head]
                        for d in range(head_dim):
                            chunk[i, d] = value[d]
                    for row in range(in_tile):
                        stop = first_stop + row
                        low = max(start, _first_seen(stop, window))
                        high = min(start + in_chunk, stop)
                        for group in range(num_groups):
                            _add_products(
                                weights[row, group, low:high],
                                chunk[low - start : high - start],
                                answers[row, head + group],
                            )
                for row in range(in_tile):
                    for group in range(num_groups):
                        for d in range(head_dim):
                            answers[row, head + group, d] /= sums[row, group]
