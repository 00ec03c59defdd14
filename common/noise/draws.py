"""Counter-based randomness: the same number for the same key, on both sides, in any order.

Gumbel noise for a token id at a position (docs/design.md §5) is -log(E), E = -log1p(-v), v = (x + 1/2) 2^-32
in float64, with x the id's 32-bit lane (`outrider.common.noise.philox`) under the key (seed, purpose) and the
counter (position, index). It does not depend on the vocabulary's size, and any subset can be computed alone.
Golden values: docs/protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.common.noise.philox import Purpose, TokenIdArray, first_word, lanes_at, lanes_row

__all__ = [
    "NoiseRow",
    "Purpose",
    "coupled_argmax",
    "coupled_one",
    "coupled_top",
    "coupled_two",
    "gumbel_at",
    "gumbel_row",
    "noise_row",
    "top_scores",
    "uniform",
]

_MOST_OF_ZERO_BITS = (32 + 127) * math.log(2)
_SLACK, _SLACK_OF_SCORE = 1e-4, 5e-7  # several times what float32 can be off by, absolute and relative
_FIRST_SPAN = 4.0  # nats below the highest: about e^4 ids of a row with noise
_LOWEST = float(np.finfo(np.float32).min)


def gumbel_row(
    seed: int, position: int, num_tokens: int, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.float64]:
    """Returns the Gumbel noise of a whole vocabulary at one position: float64 [num_tokens].

    `seed` is a uint64; `index` separates draws of one purpose at one position (candidate i).
    """
    return gumbel_of_lanes(lanes_row(seed, position, num_tokens, purpose, index))


def gumbel_at(
    seed: int, position: int, token_ids: TokenIdArray, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.float64]:
    """Returns `gumbel_row(...)[token_ids]` without computing the row where that is cheaper: float64 [n]."""
    return gumbel_of_lanes(lanes_at(seed, position, token_ids, purpose, index))


def gumbel_of_lanes(lanes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Returns the noise of 32-bit lanes: float64, finite, in [-3.14, 22.88]."""
    exponential = -np.log1p((lanes + 0.5) * -(2.0**-32))
    return np.asarray(-np.log(exponential))


def uniform(seed: int, start: int, offset: int, purpose: int) -> float:
    """Returns one number in (0, 1), keyed (seed, start, offset, purpose): the chain methods' draws.

    It is (w // 2^11 + 1/2) 2^-53, w the first word under the key (seed, purpose), counter (start, offset).
    """
    return ((first_word(seed, purpose, start, offset) >> 11) + 0.5) * 2.0**-53


def coupled_argmax(
    scores: NDArray[np.floating[Any]], seed: int, positions: Sequence[int]
) -> NDArray[np.int64]:
    """Returns argmax_i(float64(scores[r, i]) + gumbel_i(seed, positions[r])): int64 [rows].

    `scores` is float32 or float64 [rows, vocab]; -inf never wins against a finite score; equal sums go to the
    lowest id. The result is exactly that of the formula, though float64 noise is computed only for the few
    ids that can win. Raises ModelError where a row has NaN.
    """
    assert len(positions) == scores.shape[0], f"{len(positions)} positions for {scores.shape[0]} rows"
    picks = [
        coupled_one(row, noise_row(seed, position, row.size))
        for row, position in zip(scores, positions, strict=True)
    ]
    return np.array(picks, np.int64)


class NoiseRow(NamedTuple):
    """Holds what is needed of the noise of a whole vocabulary at one position."""

    lanes: NDArray[np.uint32]  # [num_tokens]
    bounds: NDArray[np.float32]  # [num_tokens], upper bounds of the noise, less `_MOST_OF_ZERO_BITS`


def noise_row(seed: int, position: int, num_tokens: int) -> NoiseRow:
    """Returns the noise that both sides share at a position.

    -log(E) <= -log(v), and the bits of a float32 x, read as an integer b, give b 2^-23 - 127 <= log2(x), so
    the noise is at most log(2) (32 + 127 - b 2^-23); b is at most 0.09 bits below. No logarithm is computed.
    """
    lanes = lanes_row(seed, position, num_tokens, Purpose.COUPLED, 0)
    bounds = lanes.astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(-math.log(2) * 2.0**-23)
    return NoiseRow(lanes, bounds)


def coupled_one(row: NDArray[np.floating[Any]], noise: NoiseRow) -> int:
    """Returns the argmax of one row and its noise, as `coupled_argmax` does. A cheap upper bound of every sum
    leaves the few ids that can win. Raises ModelError where the row has NaN."""
    most = _upper_bounds(row, noise)
    likeliest = int(most.argmax())
    score = float(row[likeliest])
    if not math.isfinite(score):
        if math.isnan(score):
            raise ModelError("the model's logits are not numbers (NaN)")
        return int((row + gumbel_of_lanes(noise.lanes)).argmax())
    reached = score + _gumbel(int(noise.lanes[likeliest]))
    slack = _SLACK + _SLACK_OF_SCORE * abs(score)
    (ids,) = (most >= np.float32(max(reached - _MOST_OF_ZERO_BITS - slack, _LOWEST))).nonzero()
    if ids.size == 1:
        return int(ids[0])
    sums = row[ids].astype(np.float64) + gumbel_of_lanes(noise.lanes[ids])
    return int(ids[sums.argmax()])


def coupled_two(row: NDArray[np.floating[Any]], noise: NoiseRow) -> tuple[int, int, float]:
    """Returns the token that `coupled_one` picks, its runner-up, and the difference of their sums.

    The row has two scores or more; the difference is infinite where nothing else can be picked. Raises
    ModelError where it has NaN. The two ids with the highest upper bounds have two sums, and the second
    largest of all sums is no less than the smaller of these: an id bounded below that is neither.
    """
    lanes, most = noise.lanes, _upper_bounds(row, noise)
    first = int(most.argmax())
    bound, most[first] = most[first], -math.inf
    second = int(most.argmax())
    most[first] = bound
    high, low = float(row[first]), float(row[second])
    if math.isnan(high) or math.isnan(low):
        raise ModelError("the model's logits are not numbers (NaN)")
    if math.isfinite(high) and math.isfinite(low):
        reached = min(high + _gumbel(int(lanes[first])), low + _gumbel(int(lanes[second])))
        slack = _SLACK + _SLACK_OF_SCORE * max(abs(high), abs(low))
        (ids,) = (most >= np.float32(max(reached - _MOST_OF_ZERO_BITS - slack, _LOWEST))).nonzero()
    else:
        ids = np.arange(row.size)
    sums = row[ids].astype(np.float64) + gumbel_of_lanes(lanes[ids])
    best = int(sums.argmax())
    highest, sums[best] = float(sums[best]), -math.inf
    rival = int(sums.argmax())
    gap = highest - float(sums[rival])
    return int(ids[best]), int(ids[rival]), gap if math.isfinite(gap) else math.inf


def coupled_top(
    row: NDArray[np.floating[Any]], noise: NoiseRow, count: int, span: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the ids with the `count` largest sums of score and noise, and these sums, largest first; fewer where
    they are more than `span` nats below the largest.

    The first is what `coupled_one` picks; there is none where all scores are -inf. Equal sums are in the order of
    their ids. Raises ModelError where the row has NaN.
    """

    def sums(ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return row[ids].astype(np.float64) + gumbel_of_lanes(noise.lanes[ids])

    return _top(_upper_bounds(row, noise), sums, count, span, _MOST_OF_ZERO_BITS)


def top_scores(
    row: NDArray[np.floating[Any]], count: int, span: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns what `coupled_top` does, without noise."""
    return _top(row, lambda ids: row[ids].astype(np.float64), count, span, 0.0)


def _top(
    bounds: NDArray[np.floating[Any]],
    sums: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    count: int,
    span: float,
    offset: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`bounds` + `offset` are upper bounds of the sums: ids far below the highest need no sum."""
    highest = float(bounds.max())
    if math.isnan(highest):
        raise ModelError("the model's logits are not numbers (NaN)")
    if highest == -math.inf:
        return np.empty(0, np.int64), np.empty(0)
    slack = _SLACK + _SLACK_OF_SCORE * abs(highest)
    least = max(highest - _FIRST_SPAN, _LOWEST)
    (ids,) = (bounds >= least).nonzero()
    found = sums(ids)
    if np.count_nonzero(found > least + offset + slack) < count:
        (ids,) = (bounds >= max(float(found.max()) - offset - span - slack, _LOWEST)).nonzero()
        found = sums(ids)
    order = np.lexsort((ids, -found))[:count]
    ids, found = ids[order], found[order]
    is_near = found >= found[0] - span
    return ids[is_near], found[is_near]


def _gumbel(lane: int) -> float:
    return -math.log(-math.log1p((lane + 0.5) * -(2.0**-32)))


def _upper_bounds(row: NDArray[np.floating[Any]], noise: NoiseRow) -> NDArray[np.float32]:
    """Returns an upper bound of each score plus noise, less `_MOST_OF_ZERO_BITS`: float32 [vocab]."""
    scores = row if row.dtype == np.float32 else row.clip(_LOWEST, -_LOWEST).astype(np.float32)
    return noise.bounds + scores
