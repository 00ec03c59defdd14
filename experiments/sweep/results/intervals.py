"""Bootstrap 95 % intervals (Efron 1979, percentile method), over requests. Pure, and seeded: the same rows
give the same interval.

A request is drawn with all it has: its gaps between tokens are not independent of one another, requests are
taken to be. What the interval leaves out is therefore everything that all requests of a run shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 1000
_BOUNDS = (0.025, 0.975)
_MAX_CELLS = 4_000_000  # of one matrix of weights

Floats = NDArray[np.float64]
Interval = tuple[float, float] | None


def _resamples(num: int, seed: int = 0) -> NDArray[np.int64]:
    """Returns which requests each resample takes: int64 [NUM_RESAMPLES, num]."""
    return np.random.default_rng(seed).integers(0, num, (NUM_RESAMPLES, num))


def of_mean(values: Sequence[float]) -> tuple[float, Interval]:
    """Returns the mean of a value a request, and its interval; None for fewer than two."""
    array = np.asarray(values, np.float64)
    draws = array[_resamples(len(array))].mean(axis=1) if len(array) > 1 else None
    return float(array.mean()), _interval(draws)


def of_ratio(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, Interval] | None:
    """Returns the sum of parts / the sum of wholes, request by request. None where the wholes add to
    nothing."""
    part, whole = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    if not whole.sum():
        return None
    draws = None
    if len(part) > 1:
        index = _resamples(len(part))
        sums = whole[index].sum(axis=1)
        draws = part[index].sum(axis=1)[sums > 0] / sums[sums > 0]
    return float(part.sum() / whole.sum()), _interval(draws)


def of_quantiles(
    groups: Sequence[Sequence[float]], quantiles: Sequence[float]
) -> list[tuple[float, Interval]] | None:
    """Returns quantiles of all groups' values together: the smallest value that has such a share at or
    below it. One group a request. None where there are no values."""
    values = np.concatenate([np.asarray(group, np.float64) for group in groups]) if groups else np.empty(0)
    if not len(values):
        return None
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    found = np.quantile(values, quantiles, method="inverted_cdf")
    if len(groups) < 2:
        return [(float(value), None) for value in found]
    draws = _resampled_quantiles(values, owner, len(groups), np.asarray(quantiles))
    return [(float(value), _interval(draws[:, i])) for i, value in enumerate(found)]


def _resampled_quantiles(
    values: Floats, owner: NDArray[np.int64], num_groups: int, quantiles: Floats
) -> Floats:
    """Returns float64 [NUM_RESAMPLES, num_quantiles]; the sorted `values` count as often as their group is
    drawn."""
    index = _resamples(num_groups)
    counts = np.stack([np.bincount(row, minlength=num_groups) for row in index])
    chunk = max(1, _MAX_CELLS // len(values))
    rows = []
    for start in range(0, len(counts), chunk):
        heights = np.cumsum(counts[start : start + chunk][:, owner], axis=1)  # [chunk, num_values]
        for height in heights:
            wanted = np.maximum(1, np.ceil(quantiles * height[-1] - 1e-9))
            places = np.searchsorted(height, wanted)
            rows.append(values[np.minimum(places, len(values) - 1)])
    return np.asarray(rows)


def _interval(draws: Floats | None) -> Interval:
    if draws is None or not len(draws):
        return None
    low, high = np.quantile(draws, _BOUNDS)
    return float(low), float(high)
