"""Passes over a row that the compiler vectorises: its top, exp((logit - top) / temperature), their sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit

CHUNK = 2048  # ids whose exponentials stay in the first cache
SLACK, SLACK_OF_SCORE = 1e-4, 5e-7  # several times what float32 can be off by, absolute and relative

_INFINITY_BITS = np.int32(0x7F800000)
_MOST_POWER = np.float32(87.0)  # exp of it, and of its negative, is a normal float32
_ROUNDER = np.float32(1.5 * 2**23)  # added and subtracted again, it rounds a float32 to an integer
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)

ROW = types.Array(types.float32, 1, "C", readonly=True)  # takes writable rows too


@jit()
def max_or_nan(values: Any) -> Any:
    """Returns the largest value, NaN where there is any. Integers of the same order compare faster."""
    bits = values.view(np.int32)
    largest, most_bits = np.int32(-(2**31)), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        order = np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        largest = order if order > largest else largest
        most_bits = magnitude if magnitude > most_bits else most_bits
    if most_bits > _INFINITY_BITS:
        return np.float32(np.nan)
    largest ^= (largest >> np.int32(31)) & np.int32(0x7FFFFFFF)
    return np.int32(largest).view(np.float32)


@jit(fastmath={"contract"})
def exp(power: Any) -> Any:
    """Returns the exponential of a float32, at least exp(-87) and at most exp(87)."""
    power = power if power > -_MOST_POWER else -_MOST_POWER
    power = power if power < _MOST_POWER else _MOST_POWER
    whole = (power * _LOG2_E + _ROUNDER) - _ROUNDER
    rest = power - whole * _LN2_HIGH - whole * _LN2_LOW
    poly = np.float32(1.9875691500e-4)  # Cephes' expf
    poly = poly * rest + np.float32(1.3981999507e-3)
    poly = poly * rest + np.float32(8.3334519073e-3)
    poly = poly * rest + np.float32(4.1665795894e-2)
    poly = poly * rest + np.float32(1.6666665459e-1)
    poly = poly * rest + np.float32(5.0000001201e-1)
    poly = poly * rest * rest + rest + np.float32(1.0)
    bits = np.float32(poly).view(np.int32) + np.int32(np.int32(whole) << np.int32(23))
    return np.int32(bits).view(np.float32)


@jit(fastmath={"contract"})
def fill_exps(values: Any, top: Any, temperature: Any, threshold: Any, out: Any) -> None:
    """Fills out[i] with exp((values[i] - top) / temperature), at least exp(-87); 0 below the threshold."""
    scale = np.float32(1.0) / temperature
    for i in range(values.size):
        out[i] = exp((values[i] - top) * scale)
    if threshold > -np.inf:
        for i in range(values.size):
            out[i] = out[i] if values[i] / temperature >= threshold else np.float32(0)


@jit(fastmath={"reassoc"})
def sum_up(values: Any) -> Any:
    """Returns the float32 sum, added up in whichever order is fast."""
    total = np.float32(0)
    for i in range(values.size):
        total += values[i]
    return total


@jit()
def find_top(row: Any) -> Any:
    """Returns (the largest logit, its lowest id), (NaN, -1) where a logit is NaN."""
    top, start = np.float32(-np.inf), 0
    for chunk in range(0, row.size, CHUNK):
        values = row[chunk : chunk + CHUNK]
        largest = max_or_nan(values)
        if largest != largest:
            return largest, -1
        if largest > top:
            top, start = largest, chunk
    while row[start] != top:
        start += 1
    return top, start


@jit()
def sum_exps(row: Any, temperature: Any, threshold: Any, top: Any) -> Any:
    """Returns the sum of exp((logit - top) / temperature) over the scores not below the threshold."""
    exps, total = np.empty(CHUNK, np.float32), 0.0
    for start in range(0, row.size, CHUNK):
        values = row[start : start + CHUNK]
        fill_exps(values, top, temperature, threshold, exps[: values.size])
        total += sum_up(exps[: values.size])
    return total
