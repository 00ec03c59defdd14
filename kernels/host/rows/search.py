"""The argmax of score plus noise over a row, exactly the reference's, with noise for few ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit
from outrider.kernels.host.exp import CHUNK, ROW, SLACK, SLACK_OF_SCORE, fill_exps, find_top, sum_up
from outrider.kernels.host.rows.noise import FIRST_BLOCK, LANES, WORDS, draw_blocks, gumbel, lane_at
from outrider.kernels.host.rows.truncation import truncation_threshold

_COUPLED = 0  # the purpose of the noise of target samples (`outrider.common.noise.philox.Purpose`)
_DENSE_CHUNKS = 7
_GROUP = 128  # blocks whose noise is made before any of it is looked at

_KEY = types.uint64[::1]
_IDS, _WEIGHTS = types.int64[::1], types.float64[::1]
_ROWS = types.Array(types.float32, 2, "C", readonly=True)


@jit()
def _list_blocks(exps: Any, least: Any, blocks: Any) -> Any:
    """Fills `blocks` with those that have an exponential >= least, moves theirs together, returns how many."""
    num_listed = 0
    for block in range(exps.size // LANES):
        num_enough = np.int32(0)
        for i in range(LANES):
            each = exps[block * LANES + i]
            num_enough += np.int32(each >= least)
            exps[num_listed * LANES + i] = each
        blocks[num_listed] = block
        num_listed += int(num_enough > 0)
    return num_listed


@jit()
def _has_hit(exps: Any, lanes: Any, half_limit: Any) -> Any:
    num_hits = np.int32(0)
    for i in range(exps.size):
        lane = np.float32(np.int32(lanes[i] >> np.uint32(1)))
        num_hits += np.int32(lane <= exps[i] * half_limit)
    return num_hits > 0


@jit()
def _weight(
    row: Any, token_id: Any, temperature: Any, threshold: Any, top: Any, log_sum: Any, changed: Any
) -> Any:
    """Returns log p where a log_sum is given, else the score; -inf for what is cut or changed."""
    score = row[token_id] / temperature
    if not score >= threshold:
        return -np.inf
    if math.isnan(log_sum):
        return np.float64(score)
    for each in changed:
        if each == token_id:
            return -np.inf
    return (np.float64(row[token_id]) - np.float64(top)) / np.float64(temperature) - log_sum


@jit()
def _half_limit(zero: Any, best: Any, slack: Any) -> Any:
    """Returns the limit for which a sum can reach `best` only where lane / 2 <= exp * limit.

    `zero` is the weight at the top.
    """
    return np.float32(2.0**31 * math.exp(min(zero - best + slack, 100.0)))


@jit()
def _search(
    row: Any,
    temperature: Any,
    threshold: Any,
    key: Any,
    top: Any,
    top_id: Any,
    log_sum: Any,
    changed_ids: Any,
    changed_weights: Any,
) -> Any:
    """Returns (token_id, sum of the exponentials), token_id -1 where every weight is -inf.

    With log_sum NaN the scores compete, else log p and the changed weights. The top must be finite.
    """
    words = np.empty(CHUNK // 2, np.uint64)
    best, best_id = -np.inf, np.int64(-1)
    for i in range(changed_ids.size):
        if changed_weights[i] > -np.inf:
            draw_blocks(key, changed_ids[i] >> 3, FIRST_BLOCK, words)
            reached = changed_weights[i] + gumbel(lane_at(words, changed_ids[i] & 7))
            if reached > best or (reached == best and changed_ids[i] < best_id):
                best, best_id = reached, changed_ids[i]
    weight = _weight(row, top_id, temperature, threshold, top, log_sum, changed_ids)
    if weight > -np.inf:  # the likeliest winner first: it spares the most of the others
        draw_blocks(key, top_id >> 3, FIRST_BLOCK, words)
        reached = weight + gumbel(lane_at(words, top_id & 7))
        if reached > best or (reached == best and top_id < best_id):
            best, best_id = reached, top_id
    top_score = np.float64(top / temperature)
    zero = top_score if math.isnan(log_sum) else -log_sum
    slack = SLACK + SLACK_OF_SCORE * (abs(top_score) + 30)
    half_limit = _half_limit(zero, best, slack)
    exps, total = np.empty(CHUNK, np.float32), 0.0
    every_block, some_blocks = np.arange(CHUNK // LANES), np.empty(CHUNK // LANES, np.int64)
    num_dense = 0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        fill_exps(values, top, temperature, threshold, exps[: values.size])
        total += sum_up(exps[: values.size])
        num_padded = (values.size + LANES - 1) // LANES * LANES
        exps[values.size : num_padded] = 0
        if num_dense > 0:  # in the last chunk listed nearly every block could win
            num_dense -= 1
            blocks, num_listed = every_block, num_padded // LANES
        else:
            blocks = some_blocks
            num_listed = _list_blocks(exps[:num_padded], np.float32(0.25) / half_limit, blocks)
            num_dense = _DENSE_CHUNKS if num_listed * LANES * 8 > num_padded * 7 else 0
        for group in range(0, num_listed, _GROUP):
            num_blocks = min(_GROUP, num_listed - group)
            kept = exps[group * LANES : (group + num_blocks) * LANES]
            draw_blocks(key, start >> 3, blocks[group : group + num_blocks], words)
            if not _has_hit(kept, words[: num_blocks * WORDS].view(np.uint32), half_limit):
                continue
            for i in range(num_blocks * LANES):
                lane = lane_at(words, i)
                if not np.float32(lane >> np.uint32(1)) <= kept[i] * half_limit:
                    continue
                token_id = start + blocks[group + i // LANES] * LANES + i % LANES
                if token_id >= row.size:
                    continue
                weight = _weight(row, token_id, temperature, threshold, top, log_sum, changed_ids)
                reached = weight + gumbel(lane)
                if reached > best or (reached == best and token_id < best_id and weight > -np.inf):
                    best, best_id = reached, token_id
                    half_limit = _half_limit(zero, best, slack)
    return best_id, total


@jit(types.Tuple((types.int64, types.float64, types.float64))(ROW, types.float32, types.float32, _KEY))
def gumbel_argmax(row: Any, temperature: Any, threshold: Any, key: Any) -> Any:
    """Computes `outrider.kernels.reference.gumbel_argmax`."""
    top, top_id = find_top(row)
    if not np.isfinite(top):
        return top_id, np.float64(top), -np.inf if top < 0 else np.nan
    ids, weights = np.empty(0, np.int64), np.empty(0, np.float64)
    token_id, total = _search(row, temperature, threshold, key, top, top_id, np.nan, ids, weights)
    return token_id, np.float64(top), math.log(total)


@jit(types.int64(ROW, types.float32, types.float32, _KEY, types.float64, types.float64, _IDS, _WEIGHTS))
def sample(
    row: Any,
    temperature: Any,
    threshold: Any,
    key: Any,
    top: Any,
    log_sum: Any,
    changed_ids: Any,
    changed_weights: Any,
) -> Any:
    """Computes `outrider.kernels.reference.sample`."""
    largest, top_id = find_top(row)
    return _search(row, temperature, threshold, key, largest, top_id, log_sum, changed_ids, changed_weights)[
        0
    ]


@jit(
    types.Array(types.float64, 2, "C")(
        _ROWS,
        types.int64,
        types.int64,
        types.float32,
        types.int64,
        types.float64,
        types.float64,
        types.uint64,
        types.int64,
        _IDS,
    )
)
def gumbel_argmax_draft(
    rows: Any,
    num_tokens: Any,
    first: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    drafted: Any,
) -> Any:
    """Computes `outrider.kernels.reference.gumbel_argmax_draft`."""
    found, num_found = np.empty((rows.shape[0] - first, 4)), 0
    key = np.zeros(4, np.uint64)
    key[0], key[1] = seed, np.uint64(_COUPLED)
    for index in range(first, rows.shape[0]):
        row = rows[index][:num_tokens]
        threshold, log_sum = -np.inf, 0.0
        if temperature == 0:
            top, token_id = find_top(row)
        else:
            threshold = truncation_threshold(row, temperature, top_k, top_p, min_p)
            key[2] = np.uint64(position + index)
            token_id, top, log_sum = gumbel_argmax(row, temperature, np.float32(threshold), key)
        each = found[num_found]
        each[0], each[1], each[2], each[3] = token_id, top, log_sum, threshold
        num_found += 1
        if index >= drafted.size or token_id != drafted[index]:
            break
    return found[:num_found]
