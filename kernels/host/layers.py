"""What a decoder layer does beside its products and its attention, on a CPU, in float32: one pass over a row each.

`outrider.kernels.plain_layers` says what is computed. A row's bits depend on no other row. Each kernel is one function
in C, given numbers and addresses: Python and compiled code (`host.stack`) run the same instructions, so that a row has
the same bits wherever it is computed. Everything is float32 and contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types

from outrider.kernels.host.compiler import c_function, jit
from outrider.kernels.host.exp import exp
from outrider.kernels.host.threads import CALL, pointer

_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(8 / math.pi)), np.float32(0.044715)


@jit(fastmath={"reassoc", "contract"})
def _inverse_length(row: Any, epsilon: Any) -> Any:
    """Returns 1 / √(mean(row²) + ε)."""
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    return np.float32(1) / np.sqrt(total / np.float32(row.size) + epsilon)


@c_function(types.void(CALL))
def add_norm_rows(call: Any) -> None:
    """Computes `plain_layers.add_norm`.

    Given: states [rows, size], what is added to them (0: nothing), weight [size], out, ε [1]; rows, size.
    """
    shape = call[5], call[6]
    states, out = carray(pointer(call[0]), shape, np.float32), carray(pointer(call[3]), shape, np.float32)
    weight = carray(pointer(call[2]), call[6], np.float32)
    epsilon = carray(pointer(call[4]), 1, np.float32)[0]
    for row in range(states.shape[0]):
        x, mine = states[row], out[row]
        if call[1]:
            more = carray(pointer(call[1]), shape, np.float32)[row]
            for i in range(x.size):
                x[i] += more[i]
        scale = _inverse_length(x, epsilon)
        for i in range(x.size):
            mine[i] = x[i] * scale * weight[i]


@c_function(types.void(CALL))
def rotate_rows(call: Any) -> None:
    """Computes `plain_layers.rotate`, keys in place too.

    Given: queries, keys and values [rows, heads, head_dim], norms [2, head_dim] (0: none), ε [1], cos and sin [rows,
    head_dim / 2], slots, int64 [rows], the pools of keys and of values [slots, kv_heads, head_dim] (0: nothing is
    copied); rows, heads of all three, KV heads, head_dim, slots of a pool.
    """
    num_rows, num_all, num_kv_heads, head_dim, num_slots = call[8], call[9], call[10], call[11], call[12]
    qkv = carray(pointer(call[0]), (num_rows, num_all, head_dim), np.float32)
    epsilon = carray(pointer(call[2]), 1, np.float32)[0]
    num_rotated, half = num_all - num_kv_heads, head_dim // 2
    num_heads = num_rotated - num_kv_heads
    cos = carray(pointer(call[3]), (num_rows, half), np.float32)
    sin = carray(pointer(call[4]), (num_rows, half), np.float32)
    slots = carray(pointer(call[5]), num_rows, np.int64)
    for row in range(num_rows):
        c, s = cos[row], sin[row]
        for head in range(num_rotated):
            x = qkv[row, head]
            if call[1]:
                norms = carray(pointer(call[1]), (2, head_dim), np.float32)
                weight = norms[0] if head < num_heads else norms[1]
                scale = _inverse_length(x, epsilon)
                for i in range(head_dim):
                    x[i] = x[i] * scale * weight[i]
            for i in range(half):
                first, second = x[i], x[half + i]
                x[i] = first * c[i] - second * s[i]
                x[half + i] = second * c[i] + first * s[i]
        if call[6]:
            keys = carray(pointer(call[6]), (num_slots, num_kv_heads, head_dim), np.float32)
            values = carray(pointer(call[7]), (num_slots, num_kv_heads, head_dim), np.float32)
            slot = slots[row]
            for head in range(num_kv_heads):
                keys[slot, head] = qkv[row, num_heads + head]
                values[slot, head] = qkv[row, num_rotated + head]


@c_function(types.void(CALL))
def gate_rows(call: Any) -> None:
    """Computes `plain_layers.gate`. Given: gates and ups [rows, 2 · size], out [rows, size], whether it is GELU by tanh
    (0: SiLU); rows, size."""
    num_rows, size = call[3], call[4]
    gate_up = carray(pointer(call[0]), (num_rows, 2 * size), np.float32)
    out = carray(pointer(call[1]), (num_rows, size), np.float32)
    for row in range(num_rows):
        gates, ups, mine = gate_up[row, :size], gate_up[row, size:], out[row]
        if call[2]:
            for i in range(size):
                x = gates[i]
                mine[i] = x / (np.float32(1) + exp(-_GELU_SCALE * (x + _GELU_CUBE * x * x * x))) * ups[i]
        else:
            for i in range(size):
                mine[i] = gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i]


@c_function(types.void(CALL))
def add_bias_rows(call: Any) -> None:
    """Adds a bias to rows. Given: rows [rows, size], bias [size]; rows, size."""
    out = carray(pointer(call[0]), (call[2], call[3]), np.float32)
    bias = carray(pointer(call[1]), call[3], np.float32)
    for row in range(out.shape[0]):
        mine = out[row]
        for i in range(mine.size):
            mine[i] += bias[i]


@c_function(types.void(CALL))
def copy_rows(call: Any) -> None:
    """Copies numbers. Given: numbers, where to; how many."""
    source, target = (
        carray(pointer(call[0]), call[2], np.float32),
        carray(pointer(call[1]), call[2], np.float32),
    )
    for i in range(source.size):
        target[i] = source[i]
