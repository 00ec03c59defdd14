"""The sum of a row's exponentials and its entropy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit
from outrider.kernels.host.exp import CHUNK, ROW, fill_exps, find_top, sum_exps


@jit(types.UniTuple(types.float64, 2)(ROW, types.float32, types.float32))
def logsumexp(row: Any, temperature: Any, threshold: Any) -> Any:
    """Computes `outrider.kernels.reference.logsumexp`."""
    top, _ = find_top(row)
    if not np.isfinite(top):
        return np.float64(top), -np.inf if top < 0 else np.nan
    return np.float64(top), math.log(sum_exps(row, temperature, threshold, top))


@jit(types.float64(ROW, types.float32, types.float32, types.float64, types.float64))
def entropy(row: Any, temperature: Any, threshold: Any, top: Any, log_sum: Any) -> Any:
    """Computes `outrider.kernels.reference.entropy` as log_sum - sum of p (logit - top) / temperature."""
    exps, weighted = np.empty(CHUNK, np.float32), 0.0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        fill_exps(values, np.float32(top), temperature, threshold, exps[: values.size])
        for i in range(values.size):
            if exps[i] > 0 and values[i] > -np.inf:
                weighted += np.float64(exps[i]) * (np.float64(values[i]) - top)
    return max(0.0, log_sum - weighted / temperature * math.exp(-log_sum))
