"""Counter-based randomness: the same number for the same key, on both sides, in any order (DESIGN §5).

Gumbel noise for a token id at a position is -log(E), E = -log1p(-v), v = (x + 1/2) 2^-32 in float64, with x
the id's 32-bit lane (`common.philox`) under the key (seed, purpose) and the counter (position, index). It
does not depend on the vocabulary's size, and any subset can be computed alone. Golden values:
docs/protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError
from common.philox import Purpose, TokenIdArray, first_word, lanes_at, lanes_row

__all__ = ["Purpose", "coupled_argmax", "gumbel_at", "gumbel_row", "uniform"]

_FEW = 200  # so many ids are cheaper in float64 at once than screened first
_SLACK = 5e-5  # above what float32 screening can be off by
_LOG_2_32 = 32 * math.log(2)


def gumbel_row(
    seed: int, position: int, num_tokens: int, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.float64]:
    """Return the Gumbel noise of a whole vocabulary at one position: float64 [num_tokens].

    `seed` is a uint64; `index` separates draws of one purpose at one position (candidate i).
    """
    return gumbel_of_lanes(lanes_row(seed, position, num_tokens, purpose, index))


def gumbel_at(
    seed: int, position: int, token_ids: TokenIdArray, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.float64]:
    """Return `gumbel_row(...)[token_ids]` without computing the row where that is cheaper: float64 [n]."""
    return gumbel_of_lanes(lanes_at(seed, position, token_ids, purpose, index))


def gumbel_of_lanes(lanes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the noise of 32-bit lanes: float64, finite, in [-3.14, 22.88]."""
    exponential = -np.log1p((lanes + 0.5) * -(2.0**-32))
    return np.asarray(-np.log(exponential))


def uniform(seed: int, start: int, offset: int, purpose: int) -> float:
    """Return one number in (0, 1), keyed (seed, start, offset, purpose): the chain methods' draws.

    (w // 2^11 + 1/2) 2^-53, w the first word under the key (seed, purpose), counter (start, offset).
    """
    return ((first_word(seed, purpose, start, offset) >> 11) + 0.5) * 2.0**-53


def coupled_argmax(
    scores: NDArray[np.floating[Any]], seed: int, positions: Sequence[int]
) -> NDArray[np.int64]:
    """Return argmax_i(float64(scores[r, i]) + gumbel_i(seed, positions[r])): int64 [rows].

    `scores` is float32 or float64 [rows, vocab]; -inf never wins against a finite score; equal sums go to the
    lowest id. The result is exactly that of the formula, though float64 noise is computed only for the few
    ids that can win. Raises ModelError where a row has NaN.
    """
    assert len(positions) == scores.shape[0], f"{len(positions)} positions for {scores.shape[0]} rows"
    num_tokens = scores.shape[1]
    picks = [
        _pick(row, lanes_row(seed, position, num_tokens, Purpose.COUPLED, 0))
        for row, position in zip(scores, positions, strict=True)
    ]
    return np.array(picks, np.int64)


def _pick(row: NDArray[np.floating[Any]], lanes: NDArray[np.uint32]) -> int:
    """The formula for one row. Noise falls as lanes rise, so the smallest lane bounds everyone's noise, and
    the two ids with the best score and the best noise bound the winner's sum from below."""
    likeliest, luckiest = int(row.argmax()), int(lanes.argmin())
    top = float(row[likeliest])
    if not math.isfinite(top):
        if math.isnan(top):
            raise ModelError("the model's logits are not numbers (NaN)")
        return int((row + gumbel_of_lanes(lanes)).argmax())
    most_noise = _gumbel_of_lane(int(lanes[luckiest]))
    # From here on, sums are relative to `top`. float64 rounds them by up to 2^-53 of their size.
    bound = max(_gumbel_of_lane(int(lanes[likeliest])), float(row[luckiest]) - top + most_noise)
    bound -= _SLACK + abs(top) * 1e-15
    floor = top + (bound - most_noise)
    ids = np.flatnonzero(row >= row.dtype.type(floor - abs(floor) * np.finfo(row.dtype).eps))
    if ids.size > _FEW:
        # -log(v) >= -log(-log1p(-v)): what passes is all that can reach the bound, and a little more.
        most = (row[ids] - top).astype(np.float32) - np.log(lanes[ids].astype(np.float32) + np.float32(0.5))
        ids = ids[most >= np.float32(bound - _LOG_2_32)]
    sums = row[ids].astype(np.float64) + gumbel_of_lanes(lanes[ids])
    return int(ids[sums.argmax()])


def _gumbel_of_lane(lane: int) -> float:
    return -math.log(-math.log1p((lane + 0.5) * -(2.0**-32)))
