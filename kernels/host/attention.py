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
_FUSED = {"contract"}


@jit(fastmath=_FUSED)
def _fill_scores(query: Any, keys: Any, scaling: Any, out: Any) -> None:
    """Fills out[i] with the scaled product of a query [head_dim] and column i of keys [head_dim, _CHUNK]."""
    whole = query.size - query.size % _STEP
    out[:] = 0
    for d in range(0, whole, _STEP):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        q4, q5, q6, q7 = query[d + 4], query[d + 5], query[d + 6], query[d + 7]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        k4, k5, k6, k7 = keys[d + 4], keys[d + 5], keys[d + 6], keys[d + 7]
        for i in range(out.size):
            total = out[i] + q0 * k0[i]
            total += q1 * k1[i]
            total += q2 * k2[i]
            total += q3 * k3[i]
            total += q4 * k4[i]
            total += q5 * k5[i]
            total += q6 * k6[i]
            out[i] = total + q7 * k7[i]
    for d in range(whole, query.size):
        for i in range(out.size):
            out[i] += query[d] * keys[d, i]
    for i in range(out.size):
        out[i] *= scaling


@jit(fastmath=_FUSED)
def _add_values(weights: Any, values: Any, out: Any) -> None:
    """Adds rows of values [n, head_dim] to `out`, each by its weight."""
    whole = weights.size - weights.size % _STEP
    for i in range(0, whole, _STEP):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        w4, w5, w6, w7 = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        v0, v1, v2, v3 = values[i], values[i + 1], values[i + 2], values[i + 3]
        v4, v5, v6, v7 = values[i + 4], values[i + 5], values[i + 6], values[i + 7]
        for d in range(out.size):
            total = out[d] + w0 * v0[d]
            total += w1 * v1[d]
            total += w2 * v2[d]
            total += w3 * v3[d]
            total += w4 * v4[d]
            total += w5 * v5[d]
            total += w6 * v6[d]
            out[d] = total + w7 * v7[d]
    for i in range(whole, weights.size):
        value = values[i]
        for d in range(out.size):
            out[d] += weights[i] * value[d]


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
    scores = np.empty((_TILE, num_groups, sequences[:, 2].max()), np.float32)
    weights = np.empty_like(scores)
    turned = np.empty((head_dim, _CHUNK), np.float32)
    chunk = np.empty((_CHUNK, head_dim), np.float32)
    for number in range(sequences.shape[0]):
        first_row, num_rows, num_tokens, first_slot = sequences[number]
        places = slots[first_slot : first_slot + num_tokens]
        for tile in range(0, num_rows, _TILE):
            in_tile = min(_TILE, num_rows - tile)
            first_stop = num_tokens - num_rows + tile + 1  # tokens that the tile's first row sees
            last_stop = first_stop + in_tile - 1
            begin = max(0, first_stop - window) if window else 0
            for kv_head in range(num_kv_heads):
                for start in range(begin, last_stop, _CHUNK):
                    stop = min(start + _CHUNK, last_stop)
                    for i in range(stop - start):
                        key = keys[places[start + i], kv_head]
                        for d in range(head_dim):
                            turned[d, i] = key[d]
                    for row in range(in_tile):
                        for group in range(num_groups):
                            _fill_scores(
                                queries[first_row + tile + row, kv_head * num_groups + group],
                                turned,
                                scaling,
                                scores[row, group, start:stop],
                            )
                for row in range(in_tile):
                    row_stop = first_stop + row
                    row_begin = max(0, row_stop - window) if window else 0
                    for group in range(num_groups):
                        mine = scores[row, group, row_begin:row_stop]
                        if softcap > 0:
                            for i in range(mine.size):
                                mine[i] = softcap * np.tanh(mine[i] / softcap)
                        shares = weights[row, group, row_begin:row_stop]
                        top = max_or_nan(mine)
                        if np.isfinite(top):
                            fill_exps(mine, top, np.float32(1), -np.inf, shares)
                        else:
                            shares[:] = np.nan
                        out[first_row + tile + row, kv_head * num_groups + group, :] = 0
                for start in range(begin, last_stop, _CHUNK):
                    stop = min(start + _CHUNK, last_stop)
                    for i in range(stop - start):
                        chunk[i] = values[places[start + i], kv_head]
                    for row in range(in_tile):
                        row_stop = first_stop + row
                        row_begin = max(0, row_stop - window) if window else 0
                        low, high = max(start, row_begin), min(stop, row_stop)
                        for group in range(num_groups):
                            _add_values(
                                weights[row, group, low:high],
                                chunk[low - start : high - start],
                                out[first_row + tile + row, kv_head * num_groups + group],
                            )
                for row in range(in_tile):
                    row_stop = first_stop + row
                    row_begin = max(0, row_stop - window) if window else 0
                    for group in range(num_groups):
                        total = sum_up(weights[row, group, row_begin:row_stop])
                        answer = out[first_row + tile + row, kv_head * num_groups + group]
                        for d in range(head_dim):
                            answer[d] /= total
