"""top-k, top-p and min-p as one lower edge a row: scores below it become -inf.

Each keeps every score equal to its edge, so the order among equal scores never matters: top-k keeps scores
>= the k-th largest; top-p keeps the fewest largest scores whose probability (after top-k) reaches p; min-p
keeps probabilities >= min_p times the largest. Masses are summed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.arrays import as_float64, is_numpy, sorted_descending

_NUM_GROUPS = 64


def truncate(xp: Any, scores: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Return scores [rows, vocab] with everything below the edge at -inf; the largest of a row stays.

    `scores` itself when nothing is to be cut: top_k 0 or at least the vocabulary, top_p 1, min_p 0.
    """
    top_k = top_k if top_k < scores.shape[1] else 0
    if not top_k and top_p >= 1 and min_p <= 0:
        return scores
    if is_numpy(xp):
        edges = [_row_edge(row, top_k, top_p, min_p) for row in scores]
        edge = np.array(edges, scores.dtype)[:, None]
    else:
        edge = row_edges(xp, scores, top_k, top_p, min_p)
    return xp.where(scores >= edge, scores, -math.inf)


def row_edges(xp: Any, scores: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Return the edge of each row, [rows, 1]: the specification, by sorting everything."""
    largest = sorted_descending(xp, scores)  # [rows, vocab]
    top, edge = largest[:, :1], largest[:, -1:]
    probs = xp.exp(as_float64(xp, largest) - as_float64(xp, top))
    if top_k:
        edge = largest[:, top_k - 1 : top_k]
        probs = xp.where(largest >= edge, probs, 0.0)
    if top_p < 1:
        before = xp.cumsum(probs, -1) - probs  # mass of what is larger
        is_kept = (before < top_p * probs.sum(-1)[:, None]) & (probs > 0)
        edge = xp.where(is_kept, largest, math.inf).min(-1)
        edge = (edge if is_numpy(xp) else edge.values)[:, None]
    if min_p > 0:
        edge = xp.where(edge > top + math.log(min_p), edge, top + math.log(min_p))
    return edge


def _row_edge(row: NDArray[np.floating[Any]], top_k: int, top_p: float, min_p: float) -> float:
    """The same for one numpy row, sorting only what can be kept."""
    top = row.max()
    if not math.isfinite(top):
        return -math.inf
    edge = -math.inf
    kept, mass = row, 0.0
    if top_k:
        kept = _largest(row, top_k)
        edge = float(kept[0])
    if top_p < 1:
        if top_k:
            kept = kept[::-1].astype(np.float64)
            mass = float(np.exp(kept - top).sum())
        else:
            weights = np.exp(row - top)
            mass = float(weights.sum(dtype=np.float64))
            # Ids with less than (1 - p) / vocab of the mass hold less than 1 - p together: not one is needed.
            kept = row[weights >= mass * (1 - top_p) / row.size * 0.999]
            kept = np.sort(kept)[::-1].astype(np.float64)
        weights = np.exp(kept - float(top))
        before = np.cumsum(weights) - weights
        edge = float(kept[int(np.count_nonzero(before < top_p * mass)) - 1])
    if min_p > 0:
        edge = max(edge, float(top) + math.log(min_p))
    return edge


def _largest(row: NDArray[np.floating[Any]], count: int) -> NDArray[np.floating[Any]]:
    """Return all values >= the `count`-th largest, ascending."""
    num_columns = row.size // _NUM_GROUPS
    if num_columns > count:
        # Maxima of disjoint groups are values of the row, so their count-th largest is at most the row's.
        maxima = row[: num_columns * _NUM_GROUPS].reshape(_NUM_GROUPS, num_columns).max(axis=0)
        row = row[row >= np.partition(maxima, num_columns - count)[num_columns - count]]
    edge = np.partition(row, row.size - count)[row.size - count]
    return np.sort(row[row >= edge])
