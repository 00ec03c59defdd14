"""What a decoder layer does beside its products and its attention, on a CPU, in float32: one pass over a row each.

`outrider.kernels.plain_layers` says what is computed. A row's bits depend on no other row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit
from outrider.kernels.host.exp import exp

_MATRIX = types.float32[:, ::1]
_TENSOR = types.float32[:, :, ::1]
_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(8 / math.pi)), np.float32(0.044715)


@jit(fastmath={"reassoc", "contract"})
def _inverse_length(row: Any, epsilon: Any) -> Any:
    """Returns 1 / √(mean(row²) + ε)."""
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    return np.float32(1) / np.sqrt(total / np.float32(row.size) + epsilon)


@jit(types.void(_MATRIX, _MATRIX, types.boolean, types.float32[::1], types.float32, _MATRIX))
def add_norm_rows(states: Any, added: Any, has_added: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Computes `plain_layers.add_norm`; `added`, of the states' shape, is not read without `has_added`."""
    for row in range(states.shape[0]):
        x, mine = states[row], out[row]
        if has_added:
            more = added[row]
            for i in range(x.size):
                x[i] += more[i]
        scale = _inverse_length(x, epsilon)
        for i in range(x.size):
            mine[i] = x[i] * scale * weight[i]


@jit(
    types.void(
        _TENSOR, _MATRIX, types.float32, _MATRIX, _MATRIX, types.int64[::1], types.int64, _TENSOR, _TENSOR
    )
)
def rotate_rows(
    qkv: Any,
    norms: Any,
    epsilon: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    num_kv_heads: Any,
    keys: Any,
    values: Any,
) -> None:
    """Computes `plain_layers.rotate`, keys in place too; without norms these are [0, head_dim].

    Keys and values are copied to the pools [slots, kv_heads, head_dim], and are not where the pools have no slots.
    """
    num_rotated, head_dim = qkv.shape[1] - num_kv_heads, qkv.shape[2]
    num_heads, half = num_rotated - num_kv_heads, head_dim // 2
    for row in range(qkv.shape[0]):
        c, s = cos[row], sin[row]
        for head in range(num_rotated):
            x = qkv[row, head]
            if norms.shape[0]:
                weight = norms[0] if head < num_heads else norms[1]
                scale = _inverse_length(x, epsilon)
                for i in range(head_dim):
                    x[i] = x[i] * scale * weight[i]
            for i in range(half):
                first, second = x[i], x[half + i]
                x[i] = first * c[i] - second * s[i]
                x[half + i] = second * c[i] + first * s[i]
        if keys.shape[0]:
            slot = slots[row]
            for head in range(num_kv_heads):
                keys[slot, head] = qkv[row, num_heads + head]
                values[slot, head] = qkv[row, num_rotated + head]


@jit(types.void(_MATRIX, types.boolean, _MATRIX))
def gate_rows(gate_up: Any, is_gelu: Any, out: Any) -> None:
    """Computes `plain_layers.gate`: of GELU by tanh with `is_gelu`, else of SiLU."""
    size = out.shape[1]
    for row in range(out.shape[0]):
        gates, ups, mine = gate_up[row, :size], gate_up[row, size:], out[row]
        if is_gelu:
            for i in range(size):
                x = gates[i]
                mine[i] = x / (np.float32(1) + exp(-_GELU_SCALE * (x + _GELU_CUBE * x * x * x))) * ups[i]
        else:
            for i in range(size):
                mine[i] = gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i]
