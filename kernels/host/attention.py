"""Attention over the paged KV pool on a CPU, in float32: a row's bits depend on no other row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numpy.lib.stride_tricks import as_strided

from outrider.kernels.host.compiler import c_function, jit
from outrider.kernels.host.exp import fill_exps, max_or_nan, sum_up
from outrider.kernels.host.threads import CALL, pointer, take
from outrider.kernels.host.tiles import PANEL, TILE, add_product, turn

_QUERIES = 96  # that read the same keys or values: of each row those of all heads with the same KV head
_CHUNK = 64  # tokens whose keys or values are read at a time


@jit()
def _first_seen(stop: Any, window: Any) -> Any:
    """Returns the first token that a row attends over whose own is the last before `stop`."""
    return max(0, stop - window) if window else 0


@jit()
def _at(rows: Any, kv_head: Any, places: Any, num_read: Any, chunk: Any) -> Any:
    """Returns a head's keys or values at these places, [num_read, a multiple of `PANEL`], of which the first are theirs
    and the others anything: where they lie, if they follow one another there, else a copy in `chunk`."""
    first, is_run = places[0], places[0] + num_read <= rows.shape[0] and rows.shape[2] == chunk.shape[1]
    for i in range(places.size):
        is_run = is_run and places[i] == first + i
    if is_run:
        found = rows[first : first + num_read, kv_head, :]
    else:
        for i in range(places.size):
            row, mine = rows[places[i], kv_head], chunk[i]
            for d in range(row.size):
                mine[d] = row[d]
        found = chunk[:num_read, :]
    return found


@jit()
def _fill_weights(scores: Any, scaling: Any, softcap: Any, weights: Any) -> Any:
    """Makes scores of a query's products with keys; fills `weights` with exp(score - the largest score), NaN where that
    is not finite; returns their sum."""
    for i in range(scores.size):
        scores[i] *= scaling
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


@jit(fastmath={"contract"})
def _add_one(weights: Any, values: Any, sums: Any) -> None:
    """Adds values [tokens, n], each by its weight, to sums [n]: `add_product` for one row, slower, also of no token."""
    for i in range(weights.size):
        for j in range(sums.size):
            sums[j] += weights[i] * values[i, j]


@jit()
def _add_seen_values(
    weights: Any, values: Any, start: Any, end: Any, stops: Any, window: Any, sums: Any
) -> None:
    """Adds what at most `TILE` queries see of the values [end - start, n] of the tokens from `start` on to sums.

    A query sees the tokens before its stop; these do not fall.
    """
    num_queries = weights.shape[0]
    # All queries see the tokens from `low` to `high`; single ones some before and after.
    low = max(start, _first_seen(stops[num_queries - 1], window))
    high = min(end, stops[0])
    if low >= high:
        low = high = end
    for query in range(num_queries):
        first, last = max(start, _first_seen(stops[query], window)), min(low, stops[query])
        _add_one(weights[query, first:last], values[first - start :], sums[query])
    if low < high:
        add_product(weights[:, low:high], values[low - start : high - start], sums)
    for query in range(num_queries):
        last = min(end, stops[query])
        _add_one(weights[query, high:last], values[high - start :], sums[query])


@jit()
def _attend(
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
    its own, the last `window` of them where that is not 0. Sums go from its first token to its last.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    num_groups = queries.shape[1] // num_kv_heads
    rows_at_once = max(1, _QUERIES // num_groups)
    most_tokens, most_rows = 0, 0
    for number in range(sequences.shape[0]):
        most_rows = max(most_rows, sequences[number, 1])
        most_tokens = max(most_tokens, sequences[number, 2])
    most_queries = min(most_rows, rows_at_once) * num_groups
    mine = np.empty((most_queries, head_dim), np.float32)
    scores = np.empty((most_queries, most_tokens + PANEL), np.float32)
    weights = np.empty((most_queries, most_tokens), np.float32)
    totals = np.empty(most_queries, np.float32)
    stops = np.empty(most_queries, np.int64)
    width = (head_dim + PANEL - 1) // PANEL * PANEL
    sums = np.empty((most_queries, width), np.float32)
    chunk = np.zeros((_CHUNK, width), np.float32)
    turned = np.empty((width, _CHUNK), np.float32)
    for number in range(sequences.shape[0]):
        first_row, num_rows, num_tokens, first_slot = sequences[number]
        for row in range(0, num_rows, rows_at_once):
            first = first_row + row
            num_queries = min(rows_at_once, num_rows - row) * num_groups
            num_tiles = (num_queries + TILE - 1) // TILE
            for query in range(num_queries):
                stops[query] = num_tokens - num_rows + row + query // num_groups + 1
            last_stop = stops[num_queries - 1]
            begin = _first_seen(stops[0], window)
            places = slots[first_slot : first_slot + last_stop]
            for kv_head in range(num_kv_heads):
                head = kv_head * num_groups
                for query in range(num_queries):
                    asking = queries[first + query // num_groups, head + query % num_groups]
                    for d in range(head_dim):
                        mine[query, d] = asking[d]

                scores[:num_queries] = 0
                for start in range(begin, last_stop, _CHUNK):
                    there = places[start : start + _CHUNK]
                    num_turned = (there.size + PANEL - 1) // PANEL * PANEL
                    turn(_at(keys, kv_head, there, num_turned, chunk), turned)
                    for tile in range(num_tiles):
                        query = num_queries * tile // num_tiles
                        after = num_queries * (tile + 1) // num_tiles
                        end = min(start + _CHUNK, stops[after - 1])
                        if start < end:
                            seen = (end - start + PANEL - 1) // PANEL * PANEL
                            add_product(
                                mine[query:after, :head_dim],
                                turned[:head_dim, :seen],
                                scores[query:after, start:],
                            )

                for query in range(num_queries):
                    own = slice(_first_seen(stops[query], window), stops[query])
                    totals[query] = _fill_weights(scores[query, own], scaling, softcap, weights[query, own])

                sums[:] = 0
                for start in range(begin, last_stop, _CHUNK):
                    end = min(start + _CHUNK, last_stop)
                    seen_values = _at(values, kv_head, places[start:end], end - start, chunk)
                    for tile in range(num_tiles):
                        query = num_queries * tile // num_tiles
                        after = num_queries * (tile + 1) // num_tiles
                        _add_seen_values(
                            weights[query:after],
                            seen_values,
                            start,
                            end,
                            stops[query:after],
                            window,
                            sums[query:after, :],
                        )

                for query in range(num_queries):
                    answer = out[first + query // num_groups, head + query % num_groups]
                    for d in range(head_dim):
                        answer[d] = sums[query, d] / totals[query]


@c_function(types.void(CALL))
def attend_rows(call: Any) -> None:
    """Writes the attention of sequences, for each thread that calls it the next ones.

    Given: 0, where threads count; queries [rows, heads, head_dim], of which a head's numbers are contiguous, the pools
    of keys and of values [slots, kv_heads, head_dim], int64 the slots of all tokens and the sequences [sequences, 4]
    (`_attend`), scaling and softcap [2], out [rows, heads, head_dim]; rows, heads, head_dim, bytes from a row of
    queries to the next and from a head to the next; slots of a pool, KV heads, slots of all tokens, sequences, window.
    """
    num_rows, num_heads, head_dim, row_bytes, head_bytes = call[8], call[9], call[10], call[11], call[12]
    num_slots, num_kv_heads, num_places, num_sequences, window = (
        call[13], call[14], call[15], call[16], call[17],
    )  # fmt: skip
    first = carray(pointer(call[1]), (num_rows, num_heads, head_dim), np.float32)
    queries = as_strided(first, (num_rows, num_heads, head_dim), (row_bytes, head_bytes, 4))
    keys = carray(pointer(call[2]), (num_slots, num_kv_heads, head_dim), np.float32)
    values = carray(pointer(call[3]), (num_slots, num_kv_heads, head_dim), np.float32)
    slots = carray(pointer(call[4]), (num_places,), np.int64)
    sequences = carray(pointer(call[5]), (num_sequences, 4), np.int64)
    floats = carray(pointer(call[6]), (2,), np.float32)
    out = carray(pointer(call[7]), (num_rows, num_heads, head_dim), np.float32)
    number = take(call)
    while number < num_sequences:
        mine = sequences[number : number + 1]
        _attend(queries, keys, values, slots, mine, window, floats[0], floats[1], out)
        number = take(call)
