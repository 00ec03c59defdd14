"""Thresholds of top-k, top-p and min-p for CUDA, in Triton: `outrider.kernels.reference.truncation_threshold` for all
rows of a step in one launch, without a sort.

The threshold is a score of the row: the largest with enough ids, or enough of the mass, at or above it. Float32 scores
in order are integers in order, so it is found by narrowing an interval of integers to one, 8 ways in each pass over
the row: eleven passes at most. Counts are exact and masses float64, so that the ids kept are the reference's unless a
mass is the wanted one to the last bits of float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_PIVOTS = 8  # of a pass
TILE = 1024  # ids that a program has in registers at once, with a sum for each and each pivot
NUM_WARPS = 8
_LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order(score):  # type: ignore[no-untyped-def]
    """Returns int64 that are in the order of float32 scores."""
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ _LOW_BITS, bits)


@triton.jit
def _score(order):  # type: ignore[no-untyped-def]
    """Returns the scores that are so ordered."""
    return tl.where(order < 0, order ^ _LOW_BITS, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scores(place, ids, num_tokens, temperature):  # type: ignore[no-untyped-def]
    values = tl.load(place + ids, mask=ids < num_tokens, other=-float("inf"))
    return tl.div_rn(values, tl.broadcast_to(temperature, values.shape))


@triton.jit  # type: ignore[untyped-decorator]
def _reached(  # type: ignore[no-untyped-def]
    place, num_tokens, temperature, top, floor, pivots,
    IS_MASS: tl.constexpr, NUM_PIVOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns float64 [pivots]: the number of the row's ids whose scores are at least a pivot and the floor, or their
    mass in units of the largest id's."""
    sums = tl.zeros((NUM_PIVOTS, TILE), tl.float64)
    for start in range(0, num_tokens, TILE):
        ids = start + tl.arange(0, TILE)
        scores = _scores(place, ids, num_tokens, temperature)
        is_counted = (ids < num_tokens) & (scores >= floor)
        if IS_MASS:
            weights = tl.where(is_counted, tl.exp(scores.to(tl.float64) - top.to(tl.float64)), 0.0)
        else:
            weights = is_counted.to(tl.float64)
        sums += tl.where(scores[None, :] >= pivots[:, None], weights[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    place, num_tokens, temperature, top, floor, wanted,
    IS_MASS: tl.constexpr, NUM_PIVOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the largest score that has `wanted` of the ids, or of their mass, at or above it."""
    low, high = _order(floor), _order(top)  # the floor has
    while low < high:
        pivots = low + ((high - low) * (tl.arange(0, NUM_PIVOTS) + 1) + NUM_PIVOTS - 1) // NUM_PIVOTS
        reached = _reached(
            place, num_tokens, temperature, top, floor, _score(pivots), IS_MASS, NUM_PIVOTS, TILE
        )
        low = tl.max(tl.where(reached >= wanted, pivots, low))
        high = tl.min(tl.where(reached >= wanted, high, pivots - 1))
    return _score(low)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    logits, row_stride, num_tokens, temperatures, rows, top_ks, top_ps, log_min_ps, thresholds,
    NUM_PIVOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Runs a program for each of `rows`."""
    row = tl.load(rows + tl.program_id(0))
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + tl.program_id(0))
    top_p, log_min_p = tl.load(top_ps + tl.program_id(0)), tl.load(log_min_ps + tl.program_id(0))
    place = logits + row * row_stride
    tops, num_nan = tl.full((TILE,), -float("inf"), tl.float32), 0
    for start in range(0, num_tokens, TILE):
        scores = _scores(place, start + tl.arange(0, TILE), num_tokens, temperature)
        num_nan += tl.sum((scores != scores).to(tl.int32))
        tops = tl.maximum(tops, scores)
    top, threshold = tl.max(tops), tl.full((), -float("inf"), tl.float32)
    if (num_nan == 0) & (tl.abs(top) < float("inf")):
        if top_k > 0:
            wanted = top_k.to(tl.float64)
            threshold = _largest(
                place, num_tokens, temperature, top, threshold, wanted, False, NUM_PIVOTS, TILE
            )
        if top_p < 1.0:
            at_floor = threshold + tl.zeros((NUM_PIVOTS,), tl.float32)
            mass = tl.max(
                _reached(place, num_tokens, temperature, top, threshold, at_floor, True, NUM_PIVOTS, TILE)
            )
            threshold = _largest(
                place, num_tokens, temperature, top, threshold, top_p * mass, True, NUM_PIVOTS, TILE
            )
        least = tl.maximum(threshold.to(tl.float64), top.to(tl.float64) + log_min_p)
        threshold = least.to(tl.float32)
    tl.store(thresholds + row, threshold)


def truncation_thresholds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    rows: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    log_min_ps: torch.Tensor,
) -> torch.Tensor:
    """Returns float32 [num_rows]: the lowest score that is kept, -inf in the rows that are not in `rows`.

    `logits` and `temperatures` are those of `outrider.kernels.device.gumbel_argmax`, temperatures of `rows` above 0;
    the others are of `rows`, int64: `top_ks` int32, 0 for none and below the vocabulary's size; `top_ps` and
    `log_min_ps`, the logarithm of min-p, float64.
    """
    thresholds = torch.full_like(temperatures, -torch.inf)
    if len(rows):
        # Triton launches on the current device, wherever its tensors are.
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _cut[(len(rows),)](
                logits, logits.stride(0), logits.shape[1], temperatures, rows, top_ks, top_ps, log_min_ps, thresholds,
                NUM_PIVOTS=NUM_PIVOTS, TILE=TILE, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return thresholds
