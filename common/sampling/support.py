"""The draft's truncated distribution at one position, as integers: q(x) = w(x) / Σ w on both sides.

Integers, so that the distribution sampled from is the one sent, bit for bit (docs/design.md §5). Ids are in
the order of their probability, equal ones by id, and the draw is an inverse CDF over that order in integer
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.common.methods import MAX_SUPPORT_SIZE
from outrider.common.noise.draws import uniform
from outrider.common.noise.philox import Purpose
from outrider.common.types import Candidate, Support

TOTAL_WEIGHT = 2**14  # about what the weights sum to: two bytes each on the wire, q off by 3e-5 at most

_NUM_GROUPS = 16
_LOWEST = float(np.finfo(np.float32).min)


def make_support(scores: NDArray[np.floating[Any]], num_ids: int) -> Support:
    """Returns the `num_ids` most probable ids of a distribution ∝ exp(scores), and their weights.

    `scores` is float [vocab] from `process_logits`, with temperature and truncation in it; masked ids are
    −inf. w = round(2^14 exp(s) / Σ exp(s)) over the ids kept; those whose weight is 0 are left out. A lone id
    has weight 1; where all are masked it is id 0, as for an argmax. Raises ModelError for NaN and +inf.
    """
    assert 1 <= num_ids <= MAX_SUPPORT_SIZE, f"a support of {num_ids} ids"
    ids = most_probable(scores, num_ids)
    if not ids.size and not np.isnan(scores).any():
        return certain(0)
    if not ids.size or math.isinf(scores[ids[0]]):
        raise ModelError("the draft's scores are not finite; its weights or its export are damaged")
    shares = np.exp(scores[ids].astype(np.float64) - float(scores[ids[0]]))
    weights = np.rint(shares * (TOTAL_WEIGHT / shares.sum())).astype(np.int64)
    num_kept = int(np.count_nonzero(weights))  # they descend
    if num_kept == 1:
        return certain(int(ids[0]))
    return Support(tuple(ids[:num_kept].tolist()), tuple(weights[:num_kept].tolist()))


def certain(token_id: int) -> Support:
    """Returns the support of a deterministic draft: greedy, or a copy."""
    return Support((token_id,), (1,))


def most_probable(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Returns the ids of the `count` largest finite scores, descending, equal ones by id.

    Infinite scores and NaN must be rejected by the caller.
    """
    edge = _LOWEST
    num_columns = scores.size // _NUM_GROUPS
    if num_columns > count:
        # Maxima of disjoint groups are scores themselves, so their count-th largest is at most the scores'.
        maxima = scores[: num_columns * _NUM_GROUPS].reshape(_NUM_GROUPS, num_columns).max(axis=0)
        edge = max(edge, float(np.partition(maxima, num_columns - count)[num_columns - count]))
    ids = np.flatnonzero(scores >= edge)
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def sample_support(support: Support, word: int) -> int:
    """Returns the id picked by a uint64 `word`: the first whose cumulative weight exceeds ⌊word · Σw / 2^64⌋.

    Each id is picked by its weight's share of the 2^64 words, to within one word.
    """
    picked = (word * sum(support.weights)) >> 64
    cumulative = accumulate(support.weights)
    return next(i for i, end in zip(support.token_ids, cumulative, strict=True) if picked < end)


def support_prob(support: Support, token_id: int) -> float:
    """Returns q = w / Σw in float64; 0 for an id that is not in the support."""
    if token_id not in support.token_ids:
        return 0.0
    return support.weights[support.token_ids.index(token_id)] / sum(support.weights)


def choose_candidate(
    support: Support, candidates: Sequence[Candidate], seed: int, position: int, first_index: int
) -> int | None:
    """Returns the first candidate that passes as a sample of the residual; None where more are needed.

    It is the first y_j with u_j < max(0, 1 − q(y_j) / p(y_j)), u_j = uniform(seed, position, first_index + j,
    RESIDUAL): a rejection sampler whose proposal is p and whose target is max(p − q, 0) / Σ max(p − q, 0).
    `position` is the index of the token to be corrected, `first_index` the number of candidates seen before.
    """
    for index, candidate in enumerate(candidates, first_index):
        draft_prob = support_prob(support, candidate.token_id)
        if draft_prob >= candidate.target_prob:
            continue
        threshold = 1.0 - draft_prob / candidate.target_prob
        if uniform(seed, position, index, Purpose.RESIDUAL) < threshold:
            return candidate.token_id
    return None
