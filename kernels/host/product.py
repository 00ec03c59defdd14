"""The product of a few rows with a matrix, by one thread and as fast as memory is read, with a library's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit

SPAN = 1024  # inputs that are summed by themselves, as oneDNN does
_STEP = 8  # inputs between which a sum stays in a register
_MATRIX = types.float32[:, ::1]
_FUSED = {"contract"}  # a product and its addition are rounded once


@jit(fastmath=_FUSED)
def _add_products(rows: Any, weight: Any, start: Any, stop: Any, out: Any) -> None:
    """Adds rows[:, start:stop] · weight[start:stop] to out."""
    whole = stop - (stop - start) % _STEP
    for i in range(start, whole, _STEP):
        w0, w1, w2, w3 = weight[i], weight[i + 1], weight[i + 2], weight[i + 3]
        w4, w5, w6, w7 = weight[i + 4], weight[i + 5], weight[i + 6], weight[i + 7]
        for row in range(rows.shape[0]):
            x0, x1, x2, x3 = rows[row, i], rows[row, i + 1], rows[row, i + 2], rows[row, i + 3]
            x4, x5, x6, x7 = rows[row, i + 4], rows[row, i + 5], rows[row, i + 6], rows[row, i + 7]
            sums = out[row]
            for j in range(sums.size):
                total = sums[j] + x0 * w0[j]
                total += x1 * w1[j]
                total += x2 * w2[j]
                total += x3 * w3[j]
                total += x4 * w4[j]
                total += x5 * w5[j]
                total += x6 * w6[j]
                sums[j] = total + x7 * w7[j]
    for i in range(whole, stop):
        last = weight[i]
        for row in range(rows.shape[0]):
            x, sums = rows[row, i], out[row]
            for j in range(sums.size):
                sums[j] += x * last[j]


@jit(types.void(_MATRIX, _MATRIX, _MATRIX), fastmath=_FUSED)
def multiply_rows(rows: Any, weight: Any, out: Any) -> None:
    """Writes rows [n, in] · weight [in, out] to out [n, out].

    A row's numbers do not depend on `n`: products are added one after another, in the order of the inputs, for each
    `SPAN` of these from zero; then the sums of spans are added. Each product and addition are rounded once together
    where the processor can (FMA). The weight is read once for all rows.
    """
    num_inputs = weight.shape[0]
    out[:] = 0
    _add_products(rows, weight, 0, min(SPAN, num_inputs), out)
    for start in range(SPAN, num_inputs, SPAN):
        sums = np.zeros_like(out)
        _add_products(rows, weight, start, min(start + SPAN, num_inputs), sums)
        out += sums
