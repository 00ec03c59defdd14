"""The truncation threshold of a row: the lowest score that top-k, top-p and min-p keep."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit
from outrider.kernels.host.exp import ROW, SLACK, find_top, max_or_nan, sum_exps

_SPAN = 64  # ids that are passed over together where none of them is wanted
_NUM_SHARES = 64
_MAX_SORTED, _NUM_BUCKETS = 1024, 256
_SCORES = types.float32[::1]


@jit(_SCORES(ROW, types.float32, types.float64))
def _scores_above(row: Any, temperature: Any, least: Any) -> Any:
    """Returns the scores >= least, in the order of their ids."""
    scores, num_found = np.empty(row.size, np.float32), 0
    for start in range(0, row.size, _SPAN):
        values = row[start : start + _SPAN]
        if max_or_nan(values) / temperature < least:
            continue
        for i in range(values.size):
            scores[num_found] = values[i] / temperature
            num_found += int(scores[num_found] >= least)
    return scores[:num_found].copy()


@jit()
def _kth_largest(row: Any, count: Any) -> Any:
    """Returns the `count`-th largest logit."""
    span = min(_SPAN, row.size // (2 * count))
    if span < 2:
        return _select(row.copy(), count)
    maxima = np.empty(row.size // span, np.float32)
    for i in range(maxima.size):
        maxima[i] = max_or_nan(row[i * span : (i + 1) * span])
    # They are logits themselves, so their count-th largest is at most the row's.
    return _select(_scores_above(row, np.float32(1), _select(maxima, count)), count)


@jit()
def _select(values: Any, count: Any) -> Any:
    """Returns the `count`-th largest of the values, which it reorders (Hoare, Algorithm 65, 1961).

    numba's own partition and sort would be half of the time that all kernels take to compile.
    """
    place, low, high = count - 1, 0, values.size - 1
    while low < high:
        pivot, i, j = values[(low + high) // 2], low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i, j = i + 1, j - 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return values[place]


@jit()
def _sink(heap: Any, place: Any, size: Any) -> None:
    """Moves the value at a place of a heap, the largest first, down to where it belongs."""
    value = heap[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if value >= heap[child]:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value


@jit()
def _nucleus_threshold(scores: Any, top: Any, least_mass: Any) -> Any:
    """Returns (the lowest of the fewest largest scores that reach a mass, is_reached).

    Masses are relative to that of `top`, the largest score. A flat distribution keeps nearly every score, and
    sorting all of them would take a hundred times as long as a sample: they are narrowed down by buckets.
    """
    reached = 0.0
    while scores.size > _MAX_SORTED:
        low, high = np.float64(scores.min()), np.float64(scores.max())
        if not low < high or low == -np.inf:
            break
        masses, scale = np.zeros(_NUM_BUCKETS), (_NUM_BUCKETS - 1) / (high - low)
        for score in scores:
            masses[int((high - score) * scale)] += math.exp(np.float64(score) - np.float64(top))
        bucket = 0
        while bucket < _NUM_BUCKETS and reached + masses[bucket] < least_mass:
            reached += masses[bucket]
            bucket += 1
        if bucket == _NUM_BUCKETS:
            return np.float32(low), False
        scores = _in_bucket(scores, high, scale, bucket)
    heap = scores.copy()
    for place in range(heap.size // 2 - 1, -1, -1):
        _sink(heap, place, heap.size)
    score = heap[0]
    for size in range(heap.size - 1, -1, -1):
        score = heap[0]
        reached += math.exp(np.float64(score) - np.float64(top))
        if reached >= least_mass:
            return score, True
        heap[0] = heap[size]
        _sink(heap, 0, size)
    return score, False


@jit()
def _in_bucket(scores: Any, high: Any, scale: Any, bucket: Any) -> Any:
    found, num_found = np.empty(scores.size, np.float32), 0
    for score in scores:
        found[num_found] = score
        num_found += int(int((high - score) * scale) == bucket)
    return found[:num_found].copy()


@jit()
def _mass(scores: Any, top: Any) -> Any:
    total = 0.0
    for score in scores:
        total += math.exp(np.float64(score) - np.float64(top))
    return total


@jit(types.float64(ROW, types.float32, types.int64, types.float64, types.float64))
def truncation_threshold(row: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Computes `outrider.kernels.reference.truncation_threshold`."""
    threshold = -np.inf
    if (top_k < 1 or top_k >= row.size) and top_p >= 1 and min_p <= 0:
        return threshold
    top, _ = find_top(row)
    if not np.isfinite(top):
        return threshold
    top_score = top / temperature
    if 0 < top_k < row.size:
        threshold = np.float64(_kth_largest(row, top_k) / temperature)
        if top_p < 1:
            kept = _scores_above(row, temperature, threshold)
            threshold = np.float64(_nucleus_threshold(kept, top_score, top_p * _mass(kept, top_score))[0])
    elif top_p < 1:
        mass = sum_exps(row, temperature, np.float32(-np.inf), top)
        # Ids below (1 - p) / vocab of the mass hold less than 1 - p together, so none of them is needed; nor,
        # as long as the others reach p, are those below a far larger share.
        for num_shares in (float(_NUM_SHARES), row.size * 1.01):
            least = top_score + min(0.0, math.log(mass * (1 - top_p) / num_shares)) - SLACK
            kept = _scores_above(row, temperature, least)
            score, is_reached = _nucleus_threshold(kept, top_score, top_p * mass)
            threshold = np.float64(score)
            if is_reached:
                break
    if min_p > 0:
        threshold = max(threshold, np.float64(top_score) + math.log(min_p))
    return threshold
