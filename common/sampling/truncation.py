"""Truncation by top-k, top-p and min-p as one threshold a row: scores below it become -inf.

Each keeps every score equal to its threshold, so the order among equal scores never matters: top-k keeps
scores >= the k-th largest; top-p keeps the fewest largest scores whose probability (after top-k) reaches p;
min-p keeps probabilities >= min_p times the largest. Masses are summed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_numpy(xp: Any) -> bool:
    """Returns whether the namespace `xp` is numpy, not torch."""
    return xp is np


def copy(xp: Any, array: Any) -> Any:
    """Returns a copy of an array of `xp`."""
    return array.copy() if is_numpy(xp) else array.clone()


def native(xp: Any, values: Any, like: Any) -> Any:
    """Returns a numpy array in the namespace, and on the device, of `like`."""
    return values if is_numpy(xp) else xp.asarray(values).to(like.device)


def sorted_descending(xp: Any, array: Any) -> Any:
    """Returns the values of each row, largest first: [rows, n]."""
    return np.sort(array, axis=-1)[:, ::-1] if is_numpy(xp) else xp.sort(array, dim=-1, descending=True)[0]


def as_float64(xp: Any, array: Any) -> Any:
    """Returns an array of `xp` in float64."""
    return array.astype(np.float64) if is_numpy(xp) else array.to(xp.float64)


_NUM_GROUPS = 16
_NUM_SHARES = 64


def truncate(xp: Any, scores: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Returns scores [rows, vocab] with everything below the threshold at -inf; the largest of a row stays.

    It returns `scores` itself when nothing is to be cut: top_k 0 or at least the vocabulary, top_p 1, min_p
    0.
    """
    top_k = top_k if top_k < scores.shape[1] else 0
    if not top_k and top_p >= 1 and min_p <= 0:
        return scores
    if is_numpy(xp):
        thresholds = [truncation_threshold(row, top_k, top_p, min_p) for row in scores]
        kept = np.full_like(scores, -math.inf)  # filling and copying is several times faster than np.where
        np.copyto(kept, scores, where=scores >= np.array(thresholds, scores.dtype)[:, None])
        return kept
    return xp.where(scores >= row_thresholds(xp, scores, top_k, top_p, min_p), scores, -math.inf)


def row_thresholds(xp: Any, scores: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Returns the threshold of each row, [rows, 1], by sorting everything: the specification."""
    largest = sorted_descending(xp, scores)  # [rows, vocab]
    top, threshold = largest[:, :1], largest[:, -1:]
    probs = xp.exp(as_float64(xp, largest) - as_float64(xp, top))
    if top_k:
        threshold = largest[:, top_k - 1 : top_k]
        probs = xp.where(largest >= threshold, probs, 0.0)
    if top_p < 1:
        before = xp.cumsum(probs, -1) - probs  # mass of what is larger
        is_kept = (before < top_p * probs.sum(-1)[:, None]) & (probs > 0)
        threshold = xp.where(is_kept, largest, math.inf).min(-1)
        threshold = (threshold if is_numpy(xp) else threshold.values)[:, None]
    if min_p > 0:
        threshold = xp.where(threshold > top + math.log(min_p), threshold, top + math.log(min_p))
    return threshold


def truncation_threshold(row: NDArray[np.floating[Any]], top_k: int, top_p: float, min_p: float) -> float:
    """Returns the threshold of one numpy row, sorting only what can be kept.

    It is -inf where the largest score is not finite.
    """
    top = row.max()
    if not math.isfinite(top):
        return -math.inf
    threshold = -math.inf
    if top_k:
        largest = _largest(row, top_k)
        threshold = float(largest[-1])
        if top_p < 1:
            threshold = _nucleus_threshold(largest, np.exp(largest - top), top_p)
    elif top_p < 1:
        threshold = _row_nucleus_threshold(row, np.exp(row - top), top_p)
    if min_p > 0:
        threshold = max(threshold, float(top) + math.log(min_p))
    return threshold


def _row_nucleus_threshold(
    row: NDArray[np.floating[Any]], weights: NDArray[np.floating[Any]], top_p: float
) -> float:
    mass = float(weights.sum(dtype=np.float64))
    # Ids below (1 - p) / vocab of the mass hold less than 1 - p together, so none of them is needed; nor, as
    # long as the others reach p, are those below a far larger share.
    for num_shares in (_NUM_SHARES, row.size * 1.01):
        is_needed = weights >= mass * (1 - top_p) / num_shares
        is_worth_picking = np.count_nonzero(is_needed) < row.size // 8
        largest = np.sort(row[is_needed] if is_worth_picking else row)[::-1]
        kept_weights = np.exp(largest - row.max())
        if float(kept_weights.sum(dtype=np.float64)) >= top_p * mass:
            break
    return _nucleus_threshold(largest, kept_weights, top_p, mass)


def _nucleus_threshold(
    largest: NDArray[np.floating[Any]],
    weights: NDArray[np.floating[Any]],
    top_p: float,
    mass: float | None = None,
) -> float:
    """Returns the smallest kept of some descending scores with their weights, out of a total mass."""
    reached = np.cumsum(weights, dtype=np.float64)
    num_kept = 1 + int(np.searchsorted(reached, top_p * (reached[-1] if mass is None else mass)))
    return float(largest[min(num_kept, largest.size) - 1])


def _largest(row: NDArray[np.floating[Any]], count: int) -> NDArray[np.floating[Any]]:
    """Returns all values >= the `count`-th largest, descending."""
    num_columns = row.size // _NUM_GROUPS
    if num_columns > count:
        # Maxima of disjoint groups are values of the row, so their count-th largest is at most the row's.
        maxima = row[: num_columns * _NUM_GROUPS].reshape(_NUM_GROUPS, num_columns).max(axis=0)
        row = row[row >= np.partition(maxima, num_columns - count)[num_columns - count]]
    ascending = np.sort(row)
    return ascending[np.searchsorted(ascending, ascending[-count]) :][::-1]
