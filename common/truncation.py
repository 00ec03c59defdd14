"""top-k, top-p and min-p as one lower edge a row: scores below it become -inf.

Each keeps every score at its edge, so equal scores stay or go together and no order among them matters:
top-k keeps scores >= the k-th largest; top-p keeps the smallest set of largest scores whose probability
(after top-k) reaches p; min-p keeps probabilities >= min_p times the largest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def truncate(xp: Any, scores: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Return scores [rows, vocab] with everything below the edge at -inf; at least one a row stays."""
    is_top_k = 0 < top_k < scores.shape[1]
    if not (is_top_k or top_p < 1 or min_p > 0):
        return scores
    values = np.asarray(scores)
    edges = [_row_edge(row, top_k if is_top_k else 0, top_p, min_p) for row in values]
    edge = xp.asarray(np.array(edges, values.dtype))[:, None]
    return xp.where(scores >= edge, scores, -math.inf)


def _row_edge(row: Any, top_k: int, top_p: float, min_p: float) -> float:
    largest = np.sort(row)[::-1]  # [vocab], descending
    edge = -np.finfo(row.dtype).max
    if top_k:
        edge = largest[top_k - 1]
        largest = largest[largest >= edge]
    if top_p < 1:
        probs = np.exp(largest.astype(np.float64) - float(largest[0]))
        before = np.cumsum(probs) - probs  # mass of the larger scores
        num_kept = int(np.count_nonzero(before < top_p * probs.sum()))
        edge = largest[num_kept - 1]
    if min_p > 0:
        edge = max(edge, float(largest[0]) + math.log(min_p))
    return float(edge)
