"""The row kernels for a CPU, compiled by numba: the functions of `outrider.kernels.reference`, several times faster.

A row is read in chunks that stay in the first cache. exp((logit - top) / temperature) is a polynomial that
vectorises; it serves the sum and the search for the winner: noise is at most -log(v), so a sum of score and
noise can exceed the best so far only where v <= exp(score - best). Philox runs only for blocks of ids where
any lane could, and float64 logarithms only for ids that pass: the token is exactly the reference's. Sums are
float32 within a chunk, and a log_sum 1e-6 off at most.

Importing this module compiles (about 10 s, once per machine: see `_jit`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

CHUNK = 2048
_LANES = 8  # ids a Philox block is for
_WORDS = 4
_SPAN = 64  # ids that are passed over together where none of them is wanted
_NUM_SHARES = 64
_COUPLED = 0  # the purpose of the noise of own samples (`outrider.common.noise.philox.Purpose`)
_DENSE_CHUNKS = 7
_GROUP = 128  # blocks whose noise is made before any of it is looked at
_FIRST = np.zeros(1, np.int64)

_INFINITY_BITS = np.int32(0x7F800000)
_LOWEST_POWER = np.float32(-87.0)  # its exp is still a normal float32
_ROUNDER = np.float32(1.5 * 2**23)  # added and subtracted again, it rounds a float32 to an integer
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_SLACK, _SLACK_OF_SCORE = 1e-4, 5e-7  # several times what float32 can be off by, absolute and relative

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_NUM_ROUNDS = 10

_ROW = types.Array(types.float32, 1, "C", readonly=True)  # takes writable rows too
_KEY = types.uint64[::1]
_SCORES = types.float32[::1]
_IDS, _WEIGHTS = types.int64[::1], types.float64[::1]
_ROWS = types.Array(types.float32, 2, "C", readonly=True)

Function = TypeVar("Function", bound=Callable[..., Any])


def _jit(signature: Any = None, **options: Any) -> Callable[[Function], Function]:
    """Compiles, here and now where a signature is given; the result is kept on disk where there is a place.

    That is __pycache__ beside this file, the user's cache directory, or NUMBA_CACHE_DIR.
    """

    def decorate(function: Function) -> Function:
        def compiled(is_cached: bool) -> Function:
            decorator = numba.njit(signature, nogil=True, error_model="numpy", cache=is_cached, **options)
            return cast(Function, decorator(function))

        if signature is None:
            return compiled(False)
        try:
            return compiled(True)
        except (RuntimeError, OSError):  # nowhere to write: every start compiles
            return compiled(False)

    return decorate


# ----------------------------------------------------------------------------------------------- noise


def _make_multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """uint64 x uint64 -> (high, low) of the 128-bit product: one instruction on x86 and ARM."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        left, right = (builder.zext(each, wide) for each in arguments)
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return context.make_tuple(builder, signature.return_type, (high, builder.trunc(product, word)))

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


_multiply: Any = intrinsic(_make_multiply)


@_jit()
def _draw(key: Any, first_block: Any, blocks: Any, words: Any) -> None:
    """Four words of numpy's Philox 4x64-10 (Salmon et al. 2011) for each of first_block + blocks."""
    seed, purpose, position, index = key[0], key[1], key[2], key[3]
    for i in range(blocks.size):
        key_0, key_1 = seed, purpose
        # numpy raises its counter before it draws. A block's number is far from 2^64, so there is no carry.
        c0, c1, c2, c3 = np.uint64(first_block + blocks[i]) + np.uint64(1), position, index, np.uint64(0)
        for _ in range(_NUM_ROUNDS):
            high_0, low_0 = _multiply(_MULTIPLIER_0, c0)
            high_1, low_1 = _multiply(_MULTIPLIER_1, c2)
            c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
            key_0 += _WEYL_0
            key_1 += _WEYL_1
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = c0, c1, c2, c3


@_jit()
def _lane(words: Any, index: Any) -> Any:
    """Lane `index` of some words, low half of a word first."""
    return np.uint32(words[index >> 1] >> np.uint64(32 * (index & 1)))


@_jit()
def _gumbel(lane: Any) -> Any:
    return -math.log(-math.log1p((np.float64(lane) + 0.5) * -(2.0**-32)))


# ------------------------------------------------------------------------- loops that the compiler vectorises


@_jit()
def _largest(values: Any) -> Any:
    """The largest value, NaN where there is any. As integers in the same order: their maximum vectorises."""
    bits = values.view(np.int32)
    largest, most_bits = np.int32(-(2**31)), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        order = np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        largest = order if order > largest else largest
        most_bits = magnitude if magnitude > most_bits else most_bits
    if most_bits > _INFINITY_BITS:
        return np.float32(np.nan)
    largest ^= (largest >> np.int32(31)) & np.int32(0x7FFFFFFF)
    return np.int32(largest).view(np.float32)


@_jit(fastmath={"contract"})
def _exps(values: Any, top: Any, temperature: Any, edge: Any, out: Any) -> None:
    """out[i] = exp((values[i] - top) / temperature), exp(-87) where it is less, 0 below the edge."""
    scale = np.float32(1.0) / temperature
    for i in range(values.size):
        power = (values[i] - top) * scale
        power = power if power > _LOWEST_POWER else _LOWEST_POWER
        whole = (power * _LOG2_E + _ROUNDER) - _ROUNDER
        rest = power - whole * _LN2_HIGH - whole * _LN2_LOW
        poly = np.float32(1.9875691500e-4)  # Cephes' expf
        poly = poly * rest + np.float32(1.3981999507e-3)
        poly = poly * rest + np.float32(8.3334519073e-3)
        poly = poly * rest + np.float32(4.1665795894e-2)
        poly = poly * rest + np.float32(1.6666665459e-1)
        poly = poly * rest + np.float32(5.0000001201e-1)
        poly = poly * rest * rest + rest + np.float32(1.0)
        bits = np.float32(poly).view(np.int32) + np.int32(np.int32(whole) << np.int32(23))
        out[i] = np.int32(bits).view(np.float32)
    if edge > -np.inf:
        for i in range(values.size):
            out[i] = out[i] if values[i] / temperature >= edge else np.float32(0)


@_jit(fastmath={"reassoc"})
def _sum(values: Any) -> Any:
    total = np.float32(0)
    for i in range(values.size):
        total += values[i]
    return total


@_jit()
def _list_blocks(exps: Any, least: Any, blocks: Any) -> Any:
    """Lists the blocks that hold an exponential >= least, theirs moved together; returns how many."""
    num_listed = 0
    for block in range(exps.size // _LANES):
        num_enough = np.int32(0)
        for i in range(_LANES):
            each = exps[block * _LANES + i]
            num_enough += np.int32(each >= least)
            exps[num_listed * _LANES + i] = each
        blocks[num_listed] = block
        num_listed += int(num_enough > 0)
    return num_listed


@_jit()
def _has_hit(exps: Any, lanes: Any, half_limit: Any) -> Any:
    num_hits = np.int32(0)
    for i in range(exps.size):
        lane = np.float32(np.int32(lanes[i] >> np.uint32(1)))
        num_hits += np.int32(lane <= exps[i] * half_limit)
    return num_hits > 0


# ------------------------------------------------------------------------------------------------ rows


@_jit()
def _find_top(row: Any) -> Any:
    """(top, its lowest id); (NaN, -1) where there is any."""
    top, start = np.float32(-np.inf), 0
    for chunk in range(0, row.size, CHUNK):
        values = row[chunk : chunk + CHUNK]
        largest = _largest(values)
        if largest != largest:
            return largest, -1
        if largest > top:
            top, start = largest, chunk
    while row[start] != top:
        start += 1
    return top, start


@_jit()
def _total(row: Any, temperature: Any, edge: Any, top: Any) -> Any:
    exps, total = np.empty(CHUNK, np.float32), 0.0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        _exps(values, top, temperature, edge, exps[: values.size])
        total += _sum(exps[: values.size])
    return total


@_jit()
def _weight(
    row: Any, token_id: Any, temperature: Any, edge: Any, top: Any, log_sum: Any, changed: Any
) -> Any:
    """log p where a log_sum is given, else the score; -inf for what is cut or changed."""
    score = row[token_id] / temperature
    if not score >= edge:
        return -np.inf
    if math.isnan(log_sum):
        return np.float64(score)
    for each in changed:
        if each == token_id:
            return -np.inf
    return (np.float64(row[token_id]) - np.float64(top)) / np.float64(temperature) - log_sum


@_jit()
def _half_limit(zero: Any, best: Any, slack: Any) -> Any:
    """A sum can reach `best` only where lane / 2 <= exps * this; `zero`: the weight at the top."""
    return np.float32(2.0**31 * math.exp(min(zero - best + slack, 100.0)))


@_jit()
def _search(
    row: Any,
    temperature: Any,
    edge: Any,
    key: Any,
    top: Any,
    top_id: Any,
    log_sum: Any,
    changed_ids: Any,
    changed_weights: Any,
) -> Any:
    """(token_id, sum of the exponentials); with log_sum NaN the scores compete, else log p and what changed.

    The top is finite. token_id is -1 where nothing is left.
    """
    words = np.empty(CHUNK // 2, np.uint64)
    best, best_id = -np.inf, np.int64(-1)
    for i in range(changed_ids.size):
        if changed_weights[i] > -np.inf:
            _draw(key, changed_ids[i] >> 3, _FIRST, words)
            reached = changed_weights[i] + _gumbel(_lane(words, changed_ids[i] & 7))
            if reached > best or (reached == best and changed_ids[i] < best_id):
                best, best_id = reached, changed_ids[i]
    weight = _weight(row, top_id, temperature, edge, top, log_sum, changed_ids)
    if weight > -np.inf:  # the likeliest winner first: it spares the most of the others
        _draw(key, top_id >> 3, _FIRST, words)
        reached = weight + _gumbel(_lane(words, top_id & 7))
        if reached > best or (reached == best and top_id < best_id):
            best, best_id = reached, top_id
    top_score = np.float64(top / temperature)
    zero = top_score if math.isnan(log_sum) else -log_sum
    slack = _SLACK + _SLACK_OF_SCORE * (abs(top_score) + 30)
    half_limit = _half_limit(zero, best, slack)
    exps, total = np.empty(CHUNK, np.float32), 0.0
    every_block, some_blocks = np.arange(CHUNK // _LANES), np.empty(CHUNK // _LANES, np.int64)
    num_dense = 0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        _exps(values, top, temperature, edge, exps[: values.size])
        total += _sum(exps[: values.size])
        num_padded = (values.size + _LANES - 1) // _LANES * _LANES
        exps[values.size : num_padded] = 0
        if num_dense > 0:  # the last time that it was looked, nearly every block could win
            num_dense -= 1
            blocks, num_listed = every_block, num_padded // _LANES
        else:
            blocks = some_blocks
            num_listed = _list_blocks(exps[:num_padded], np.float32(0.25) / half_limit, blocks)
            num_dense = _DENSE_CHUNKS if num_listed * _LANES * 8 > num_padded * 7 else 0
        for group in range(0, num_listed, _GROUP):
            num_blocks = min(_GROUP, num_listed - group)
            kept = exps[group * _LANES : (group + num_blocks) * _LANES]
            _draw(key, start >> 3, blocks[group : group + num_blocks], words)
            if not _has_hit(kept, words[: num_blocks * _WORDS].view(np.uint32), half_limit):
                continue
            for i in range(num_blocks * _LANES):
                lane = _lane(words, i)
                if not np.float32(lane >> np.uint32(1)) <= kept[i] * half_limit:
                    continue
                token_id = start + blocks[group + i // _LANES] * _LANES + i % _LANES
                if token_id >= row.size:
                    continue
                weight = _weight(row, token_id, temperature, edge, top, log_sum, changed_ids)
                reached = weight + _gumbel(lane)
                if reached > best or (reached == best and token_id < best_id and weight > -np.inf):
                    best, best_id = reached, token_id
                    half_limit = _half_limit(zero, best, slack)
    return best_id, total


@_jit(_SCORES(_ROW, types.float32, types.float64))
def _scores_above(row: Any, temperature: Any, least: Any) -> Any:
    """The scores >= least, in order."""
    scores, num_found = np.empty(row.size, np.float32), 0
    for start in range(0, row.size, _SPAN):
        values = row[start : start + _SPAN]
        if _largest(values) / temperature < least:
            continue
        for i in range(values.size):
            scores[num_found] = values[i] / temperature
            num_found += int(scores[num_found] >= least)
    return scores[:num_found].copy()


# ---------------------------------------------------------------------- what `outrider.kernels.reference` describes


@_jit(types.UniTuple(types.float64, 2)(_ROW, types.float32, types.float32))
def survey(row: Any, temperature: Any, edge: Any) -> Any:
    top, _ = _find_top(row)
    if not np.isfinite(top):
        return np.float64(top), -np.inf if top < 0 else np.nan
    return np.float64(top), math.log(_total(row, temperature, edge, top))


@_jit(types.Tuple((types.int64, types.float64, types.float64))(_ROW, types.float32, types.float32, _KEY))
def scan(row: Any, temperature: Any, edge: Any, key: Any) -> Any:
    top, top_id = _find_top(row)
    if not np.isfinite(top):
        return top_id, np.float64(top), -np.inf if top < 0 else np.nan
    ids, weights = np.empty(0, np.int64), np.empty(0, np.float64)
    token_id, total = _search(row, temperature, edge, key, top, top_id, np.nan, ids, weights)
    return token_id, np.float64(top), math.log(total)


@_jit(types.int64(_ROW, types.float32, types.float32, _KEY, types.float64, types.float64, _IDS, _WEIGHTS))
def sample(
    row: Any,
    temperature: Any,
    edge: Any,
    key: Any,
    top: Any,
    log_sum: Any,
    changed_ids: Any,
    changed_weights: Any,
) -> Any:
    largest, top_id = _find_top(row)
    token_id, _ = _search(row, temperature, edge, key, largest, top_id, log_sum, changed_ids, changed_weights)
    return token_id


@_jit(types.float64(_ROW, types.float32, types.float32, types.float64, types.float64))
def entropy(row: Any, temperature: Any, edge: Any, top: Any, log_sum: Any) -> Any:
    """H = log_sum - sum of p (logit - top) / temperature."""
    exps, weighted = np.empty(CHUNK, np.float32), 0.0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        _exps(values, np.float32(top), temperature, edge, exps[: values.size])
        for i in range(values.size):
            if exps[i] > 0 and values[i] > -np.inf:
                weighted += np.float64(exps[i]) * (np.float64(values[i]) - top)
    return max(0.0, log_sum - weighted / temperature * math.exp(-log_sum))


@_jit()
def _kth_largest(row: Any, count: Any) -> Any:
    """The `count`-th largest logit."""
    span = min(_SPAN, row.size // (2 * count))
    if span < 2:
        return np.partition(row, row.size - count)[row.size - count]
    maxima = np.empty(row.size // span, np.float32)
    for i in range(maxima.size):
        maxima[i] = _largest(row[i * span : (i + 1) * span])
    # They are logits themselves, so their count-th largest is at most the row's.
    least = np.partition(maxima, maxima.size - count)[maxima.size - count]
    kept = _scores_above(row, np.float32(1), least)
    return np.partition(kept, kept.size - count)[kept.size - count]


@_jit()
def _nucleus_edge(descending: Any, least_mass: Any) -> Any:
    """(the smallest of the fewest scores that reach the mass, relative to the first's; whether they do)"""
    reached = 0.0
    for score in descending:
        reached += math.exp(np.float64(score) - np.float64(descending[0]))
        if reached >= least_mass:
            return score, True
    return descending[-1], False


@_jit()
def _mass(descending: Any) -> Any:
    total = 0.0
    for score in descending:
        total += math.exp(np.float64(score) - np.float64(descending[0]))
    return total


@_jit(types.float64(_ROW, types.float32, types.int64, types.float64, types.float64))
def find_edge(row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    edge = -np.inf
    if (top_k < 1 or top_k >= row.size) and top_p >= 1 and min_p <= 0:
        return edge
    top, _ = _find_top(row)
    if not np.isfinite(top):
        return edge
    top_score = top / temperature
    if 0 < top_k < row.size:
        edge = np.float64(_kth_largest(row, top_k) / temperature)
        if top_p < 1:
            kept = np.sort(_scores_above(row, temperature, edge))[::-1]
            edge = np.float64(_nucleus_edge(kept, top_p * _mass(kept))[0])
    elif top_p < 1:
        mass = _total(row, temperature, np.float32(-np.inf), top)
        # Ids below (1 - p) / vocab of the mass hold less than 1 - p together, so none of them is needed; nor,
        # as long as the others reach p, are those below a far larger share.
        for num_shares in (float(_NUM_SHARES), row.size * 1.01):
            least = top_score + min(0.0, math.log(mass * (1 - top_p) / num_shares)) - _SLACK
            kept = np.sort(_scores_above(row, temperature, least))[::-1]
            score, is_reached = _nucleus_edge(kept, top_p * mass)
            edge = np.float64(score)
            if is_reached:
                break
    if min_p > 0:
        edge = max(edge, np.float64(top_score) + math.log(min_p))
    return edge


@_jit(
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
def scan_draft(
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
    found, num_found = np.empty((rows.shape[0] - first, 4)), 0
    key = np.zeros(4, np.uint64)
    key[0], key[1] = seed, np.uint64(_COUPLED)
    for index in range(first, rows.shape[0]):
        row = rows[index][:num_tokens]
        edge, log_sum = -np.inf, 0.0
        if temperature == 0:
            top, token_id = _find_top(row)
        else:
            edge = find_edge(row, temperature, top_k, top_p, min_p)
            key[2] = np.uint64(position + index)
            token_id, top, log_sum = scan(row, temperature, np.float32(edge), key)
        each = found[num_found]
        each[0], each[1], each[2], each[3] = token_id, top, log_sum, edge
        num_found += 1
        if index >= drafted.size or token_id != drafted[index]:
            break
    return found[:num_found]
