"""The row kernels for CUDA, in Triton: `outrider.kernels.reference` for all rows of a step in two launches.

No probabilities and no noise are written to memory: each program reads a span of a row, in tiles, and writes
its largest logit, its sum of exponentials and its best sum of weight and noise; spans are combined in order.
A tile that cannot reach the best so far with the largest noise there is needs no noise. Of the others each id has a
float32 bound, at least its weight - log v, and those whose bound reaches the best have their sums in float64.
So the token is the reference's, except where two sums differ in the last bits of float64 (a GPU's logarithm may round
otherwise); equal sums go to the lowest id. A sum of exponentials is float32 within a span: log_sum and entropy are 1e-5
off at most. On an H100 no token of 3,650 rows differed from the host's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

SPAN = 4096  # ids a program reads
TILE_BLOCKS = 32  # Philox blocks of eight ids that it has in registers at once: one a thread
NUM_WARPS = 1  # whose sums need no memory between them
_BLOCK = tl.constexpr(8)
_ROUNDS = tl.constexpr(10)
MAX_CHANGED = 64
NO_CHANGE = 2**31 - 1
_NO_ID = tl.constexpr(NO_CHANGE)
_SLACK, _SLACK_OF_SCORE = tl.constexpr(1e-4), tl.constexpr(5e-7)  # several times what float32 can be off by
_MOST_NOISE = tl.constexpr(22.875)  # -log of the least v, 2^-33, rounded up
# -log v of v = x / 2^32 is at most the first less the second times the bits of x.
_NO_LOGS, _LOG_OF_BIT = tl.constexpr(159 * math.log(2)), tl.constexpr(math.log(2) / 2**23)


@triton.jit
def _words(seed, purpose, position, index, blocks):  # type: ignore[no-untyped-def]
    """Returns the four words of numpy's Philox 4x64-10 of each block; everything is uint64."""
    zero = blocks * 0
    multiplier_0, multiplier_1 = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
    weyl_0, weyl_1 = zero + 0x9E3779B97F4A7C15, zero + 0xBB67AE8584CAA73B
    key_0, key_1 = zero + seed, zero + purpose
    c0, c1, c2, c3 = blocks + 1, zero + position, zero + index, zero  # numpy counts up before it draws
    for _ in tl.static_range(_ROUNDS):
        high_0, low_0 = tl.umulhi(multiplier_0, c0), multiplier_0 * c0
        high_1, low_1 = tl.umulhi(multiplier_1, c2), multiplier_1 * c2
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += weyl_0
        key_1 += weyl_1
    return c0, c1, c2, c3


@triton.jit
def _block_words(key, blocks):  # type: ignore[no-untyped-def]
    """Returns the words of each block; `key` is four int64."""
    seed = tl.load(key).to(tl.uint64, bitcast=True)
    purpose = tl.load(key + 1).to(tl.uint64, bitcast=True)
    position = tl.load(key + 2).to(tl.uint64, bitcast=True)
    index = tl.load(key + 3).to(tl.uint64, bitcast=True)
    return _words(seed, purpose, position, index, blocks.to(tl.uint64))


@triton.jit
def _lane_of(key, blocks, lane):  # type: ignore[no-untyped-def]
    """Returns one 32-bit lane of each block, low half of a word first."""
    word_0, word_1, word_2, word_3 = _block_words(key, blocks)
    word = tl.where(lane < 4, tl.where(lane < 2, word_0, word_1), tl.where(lane < 6, word_2, word_3))
    return tl.where(lane % 2 == 0, word & 0xFFFFFFFF, word >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _all_lanes(key, blocks, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the eight lanes of each of the blocks [NUM_BLOCKS], [NUM_BLOCKS, 8]: a thread has all of a block, whose
    words would else be computed by each of several."""
    word_0, word_1, word_2, word_3 = _block_words(key, blocks)
    pairs = tl.permute(tl.join(tl.join(word_0, word_1), tl.join(word_2, word_3)), (0, 2, 1))
    words = tl.reshape(pairs, (NUM_BLOCKS, 4))
    return tl.reshape(tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32)), (NUM_BLOCKS, _BLOCK))


@triton.jit
def _gumbel(lanes):  # type: ignore[no-untyped-def]
    """Returns -log(-log1p(-v)) in float64. 1 - v is exact there, so log replaces log1p."""
    v = (lanes.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def _pick(sums, ids):  # type: ignore[no-untyped-def]
    """Returns the largest sum and its lowest id."""
    best = tl.max(sums)
    return best, tl.min(tl.where(sums == best, ids, _NO_ID))


@triton.jit
def _better(best, best_id, other, other_id):  # type: ignore[no-untyped-def]
    """Returns the larger of two sums and its id, of equal ones that of the lower id."""
    is_other = (other > best) | ((other == best) & (other_id < best_id))
    return tl.where(is_other, other, best), tl.where(is_other, other_id, best_id)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    logits, row_stride, num_tokens, temperatures, thresholds, keys,
    rows, known_tops, known_log_sums, changed_ids, changed_weights,
    tops, totals, weighted_totals, bests, best_ids,
    IS_RESIDUAL: tl.constexpr, HAS_NOISE: tl.constexpr, NUM_CHANGED: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Runs program (sample, span). With IS_RESIDUAL log p and the changed weights of a sample compete, in the row that
    `rows` names; else the scores of the row of the same number."""
    number, span = tl.program_id(0), tl.program_id(1)
    out = number * tl.num_programs(1) + span
    row = tl.load(rows + number) if IS_RESIDUAL else number
    temperature, threshold = tl.load(temperatures + row), tl.load(thresholds + row)
    is_greedy = temperature == 0
    temperature = tl.where(is_greedy, 1.0, temperature)
    inverse = 1.0 / temperature
    most_noise = tl.where(is_greedy, 0.0, _MOST_NOISE)
    top, zero = -float("inf"), 0.0
    totals_here, weighted_here = (
        tl.zeros((NUM_BLOCKS, _BLOCK), tl.float32),
        tl.zeros((NUM_BLOCKS, _BLOCK), tl.float32),
    )
    num_nan = tl.zeros((NUM_BLOCKS, _BLOCK), tl.int32)
    best, best_id = tl.full((), -float("inf"), tl.float64), tl.full((), _NO_ID, tl.int32)
    num_changed = 0
    known_top, known_log_sum = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if IS_RESIDUAL:
        known_top, known_log_sum = tl.load(known_tops + row), tl.load(known_log_sums + row)
        changed = tl.load(changed_ids + number * NUM_CHANGED + tl.arange(0, NUM_CHANGED))
        num_changed = tl.sum((changed != _NO_ID).to(tl.int32))
        if span == 0:
            added = tl.load(changed_weights + number * NUM_CHANGED + tl.arange(0, NUM_CHANGED))
            noise = _gumbel(_lane_of(keys + number * 4, changed // _BLOCK, changed % _BLOCK))
            best, best_id = _pick(added + noise, changed)
    of_row = logits + row.to(tl.int64) * row_stride
    for start in range(0, SPAN, NUM_BLOCKS * _BLOCK):
        blocks = (span * SPAN + start) // _BLOCK + tl.arange(0, NUM_BLOCKS)
        ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        values = tl.load(of_row + ids, mask=ids < num_tokens, other=-float("inf"))
        scores, is_kept = values * inverse, values > -float("inf")  # as close as a bound has to be
        if threshold > -float("inf"):
            scores = tl.div_rn(values, tl.broadcast_to(temperature, values.shape))
            is_kept = is_kept & (scores >= threshold)
        if IS_RESIDUAL:
            for each in range(num_changed):
                is_kept = is_kept & (ids != tl.load(changed_ids + number * NUM_CHANGED + each))
            rough = (values - known_top.to(tl.float32)) * inverse - known_log_sum.to(tl.float32)
            most_weight = tl.max(tl.where(is_kept, rough, -float("inf")))
        else:
            rough = scores
            tile_top = tl.max(values)
            if tile_top > top:
                moved = tl.where(top == -float("inf"), 0.0, top - tile_top)
                rescale = tl.exp(moved * inverse)
                weighted_here = (weighted_here + moved * totals_here) * rescale
                totals_here *= rescale
                top, zero = tile_top, tile_top
            num_nan += (values != values).to(tl.int32)
            distance = tl.where(is_kept, values - zero, 0.0)
            exps = tl.where(is_kept, tl.exp(distance * inverse), 0.0)
            totals_here += exps
            weighted_here += exps * distance
            most_weight = tl.div_rn(tile_top, temperature)
        most_slack = _SLACK + _SLACK_OF_SCORE * tl.abs(
            tl.where(most_weight > -float("inf"), most_weight, 0.0)
        )
        if HAS_NOISE and most_weight + most_noise + most_slack >= best.to(tl.float32) - _SLACK:
            if is_greedy & (not IS_RESIDUAL):
                tile_best, tile_id = _pick(tl.where(is_kept, scores, -float("inf")), ids)
                best, best_id = _better(best, best_id, tile_best.to(tl.float64), tile_id)
            else:
                lanes = _all_lanes(keys + number * 4, blocks, NUM_BLOCKS)
                # A number's bits are at most its logarithm: this is at least the noise, by 0.06 and less.
                logs = (lanes.to(tl.float32) + 0.5).to(tl.int32, bitcast=True).to(tl.float32)
                most = _NO_LOGS - logs * _LOG_OF_BIT
                slack = _SLACK + _SLACK_OF_SCORE * tl.abs(tl.where(is_kept, rough, 0.0))
                bounds = tl.where(is_kept, rough + most + slack, -float("inf"))
                most_bound = tl.max(bounds)
                while (most_bound > -float("inf")) & (most_bound >= best.to(tl.float32) - _SLACK):
                    token_id = tl.min(tl.where(bounds == most_bound, ids, _NO_ID))
                    is_it = ids == token_id
                    lane = tl.sum(tl.where(is_it, lanes, 0))
                    value = tl.load(of_row + token_id)
                    if IS_RESIDUAL:
                        weight = (value.to(tl.float64) - known_top) / temperature.to(
                            tl.float64
                        ) - known_log_sum
                    else:
                        weight = tl.div_rn(value, temperature).to(tl.float64)
                    best, best_id = _better(best, best_id, weight + _gumbel(lane), token_id)
                    bounds = tl.where(is_it, -float("inf"), bounds)
                    most_bound = tl.max(bounds)
    tl.store(bests + out, best)
    tl.store(best_ids + out, tl.where(best > -float("inf"), best_id, _NO_ID))
    if not IS_RESIDUAL:
        tl.store(tops + out, tl.where(tl.sum(num_nan) > 0, float("nan"), top))
        tl.store(totals + out, tl.sum(totals_here))
        tl.store(weighted_totals + out, tl.sum(weighted_here))


@triton.jit  # type: ignore[untyped-decorator]
def _combine_spans(  # type: ignore[no-untyped-def]
    tops, totals, weighted_totals, bests, best_ids, temperatures, token_ids, row_tops, log_sums, entropies, num_spans,
    IS_RESIDUAL: tl.constexpr, PADDED_SPANS: tl.constexpr,
):  # fmt: skip
    """Runs program (sample): what `_search` found in its spans, put together."""
    number, span = tl.program_id(0), tl.arange(0, PADDED_SPANS)
    is_span, at = span < num_spans, number * num_spans + span
    sums = tl.load(bests + at, mask=is_span, other=-float("inf"))
    _, token_id = _pick(sums, tl.load(best_ids + at, mask=is_span, other=_NO_ID))
    token_id = token_id.to(tl.int64)
    if IS_RESIDUAL:
        token_id = tl.where(token_id == _NO_ID, -1, token_id)
    else:
        temperature = tl.load(temperatures + number).to(tl.float64)
        temperature = tl.where(temperature == 0, 1.0, temperature)
        span_tops = tl.load(tops + at, mask=is_span, other=-float("inf"))
        is_nan = span_tops != span_tops
        has_nan = tl.sum(is_nan.to(tl.int32)) > 0
        top = tl.where(has_nan, float("nan"), tl.max(tl.where(is_nan, -float("inf"), span_tops)))
        kept = tl.load(totals + at, mask=is_span, other=0.0)
        zero = tl.where(top == -float("inf"), 0.0, top)
        distance = tl.where(kept > 0, span_tops - zero, 0.0).to(tl.float64)
        shares = tl.where(kept > 0, tl.exp(distance / temperature), 0.0)
        total = tl.sum(shares * kept)
        used = tl.where(total == 0, 1.0, total)
        log_total = tl.where(total == 0, -float("inf"), tl.log(used))
        weighted = tl.load(weighted_totals + at, mask=is_span, other=0.0)
        mean_distance = tl.sum(shares * (weighted + distance * kept)) / temperature / used
        token_id = tl.where(has_nan, -1, tl.where(token_id == _NO_ID, 0, token_id))
        tl.store(row_tops + number, top)
        tl.store(log_sums + number, log_total)
        tl.store(entropies + number, log_total - mean_distance)
    tl.store(token_ids + number, token_id)


@dataclass(frozen=True)
class SampledRows:
    """Holds what `gumbel_argmax` found in every row: [rows] on the device (`outrider.kernels.reference`)."""

    token_ids: torch.Tensor  # int64, -1 where the row has NaN
    tops: torch.Tensor  # float32
    log_sums: torch.Tensor  # float64
    entropies: torch.Tensor  # float64


def gumbel_argmax(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    keys: torch.Tensor,
    *,
    has_noise: bool = True,
) -> SampledRows:
    """Samples every row and sums it up.

    `logits` is float32 [rows, vocab], last dimension contiguous; `temperatures` and `thresholds` float32
    [rows]; `keys` int64 [rows, 4], the bits of uint64 [seed, purpose, position, index]. All are on one
    device. At temperature 0 the token is the argmax and the rest is as at 1; without noise the tokens have no
    meaning.
    """
    return _launch(logits, temperatures, thresholds, keys, None, has_noise=has_noise)


def draft_signals(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns entropy in bits, nll in nats and margin, float64 [rows], and the top ids [rows, num_top].

    The nll is of `token_ids`; `num_top` is 2 or more. See `outrider.kernels.reference.draft_signals`.
    """
    ones = torch.ones(logits.shape[0], device=logits.device)
    keys = torch.zeros((logits.shape[0], 4), dtype=torch.int64, device=logits.device)
    sampled = gumbel_argmax(logits, ones, torch.full_like(ones, -torch.inf), keys, has_noise=False)
    log_total = sampled.tops.double() + sampled.log_sums
    largest, top_ids = logits.topk(num_top, dim=1)
    first, second = (largest[:, :2].double() - log_total[:, None]).exp().unbind(1)
    nll = log_total - logits.gather(1, token_ids[:, None])[:, 0].double()
    return sampled.entropies / math.log(2), nll, first - second, top_ids


@dataclass(frozen=True)
class Changes:
    """Holds what sets samples apart from their rows' own: [samples] on the device."""

    rows: torch.Tensor  # int64: of the logits
    tops: torch.Tensor  # float64 [rows], what `gumbel_argmax` found, as the next
    log_sums: torch.Tensor
    ids: torch.Tensor  # int32 [samples, MAX_CHANGED]: whose weights are changed, then NO_CHANGE
    weights: torch.Tensor  # float64 [samples, MAX_CHANGED]: the weights of these ids, then -inf


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    keys: torch.Tensor,
    changes: Changes,
) -> torch.Tensor:
    """Returns samples int64 [samples], -1 where every weight is -inf (`outrider.kernels.reference.sample`).

    The first three arguments are those of `gumbel_argmax`; `keys` are of the samples, [samples, 4].
    """
    return _launch(logits, temperatures, thresholds, keys, changes).token_ids


def _launch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    keys: torch.Tensor,
    changes: Changes | None,
    *,
    has_noise: bool = True,
) -> SampledRows:
    """Returns the tokens of all samples, and the rest where there are no `changes`."""
    vocab_size, num_samples = logits.shape[1], len(keys)
    num_spans = triton.cdiv(vocab_size, SPAN)
    new = partial(torch.empty, device=logits.device)
    of_spans = num_samples, num_spans
    found = (
        *new((3, *of_spans), dtype=torch.float32),
        new(of_spans, dtype=torch.float64),
        new(of_spans, dtype=torch.int32),
    )
    log_sums, entropies = new((2, num_samples), dtype=torch.float64)
    rows = SampledRows(
        new(num_samples, dtype=torch.int64), new(num_samples, dtype=torch.float32), log_sums, entropies
    )
    # Those of no changes are not read.
    used = changes or Changes(keys, found[3], found[3], found[4], found[3])
    # Triton launches on the current device, wherever its tensors are.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _search[of_spans](
            logits, logits.stride(0), vocab_size, temperatures, thresholds, keys,
            used.rows, used.tops, used.log_sums, used.ids, used.weights, *found,
            IS_RESIDUAL=changes is not None, HAS_NOISE=has_noise, NUM_CHANGED=used.ids.shape[1],
            NUM_BLOCKS=TILE_BLOCKS, SPAN=SPAN, enable_fp_fusion=False, num_warps=NUM_WARPS,
        )  # fmt: skip
        _combine_spans[(num_samples,)](
            *found, temperatures, rows.token_ids, rows.tops, rows.log_sums, rows.entropies, num_spans,
            IS_RESIDUAL=changes is not None, PADDED_SPANS=triton.next_power_of_2(num_spans),
            enable_fp_fusion=False, num_warps=1,
        )  # fmt: skip
    return rows
