"""Layers of a decoder, one after another in one call of compiled code.

For few rows of a small target Python takes as long as what it calls: a layer is some hundred operations of Python and
torch. The parts are the functions that Python calls too, by their addresses, so that bits are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from outrider.kernels.host.attention import attend_rows
from outrider.kernels.host.compiler import c_function, jit
from outrider.kernels.host.layers import add_bias_rows, add_norm_rows, copy_rows, gate_rows, rotate_rows
from outrider.kernels.host.product import multiply
from outrider.kernels.host.threads import CALL, call, pointer, share

# What a run is given: numbers, and addresses of float32 where nothing else is said. Sizes of the decoder:
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, IS_GELU, EPSILON = range(7)
LAYERS, ORDER, NUM_LAYERS = range(7, 10)  # int64 [all layers, NUM_FIELDS]; which of them are run, int64
# Rows, and what lies [rows, ...]: states, to which layers add; what is still to be added to them after the last layer;
# and room for what is computed between.
NUM_ROWS, STATES, ADDED, NORMED, QKV, ATTENDED, GATE_UP, GATED = range(10, 18)
COS, SIN, WRITTEN = range(18, 21)  # the last are the slots of the rows, int64
PARTS, NUM_PARTS, PLACES, NUM_PLACES, NUM_SLOTS = range(21, 26)  # of `attend_rows`
POOL, SHARES_ATTENTION = range(26, 28)  # of `threads.share`; whether attention is shared, too
ADD_NORM, ROTATE, ATTEND, GATE, ADD_BIAS, COPY = range(28, 34)  # addresses of functions
SIZE = 34
# Of a layer: weights of norms, 0 where it has none of the kind; of each product its function, its call, its bias and
# its outputs; the pools of keys and values; the rule of its attention; and where its states are kept, 0 for nowhere.
INPUT_NORM, HEAD_NORMS, ATTENTION_NORM, MLP_NORM, DOWN_NORM = range(5)
QKV_PRODUCT, OUTPUT_PRODUCT, GATE_UP_PRODUCT, DOWN_PRODUCT = range(5, 21, 4)
KEYS, VALUES, WINDOW, RULE, KEPT = range(21, 26)
NUM_FIELDS = 26

FUNCTIONS = tuple(
    each.address for each in (add_norm_rows, rotate_rows, attend_rows, gate_rows, add_bias_rows, copy_rows)
)


@jit()
def _multiply(run: Any, given: Any, layer: Any, product: Any, rows_at: Any, out_at: Any) -> None:
    multiply(run[POOL], layer[product], layer[product + 1], rows_at, run[NUM_ROWS], out_at)
    if layer[product + 2]:
        given[0], given[1], given[2], given[3] = out_at, layer[product + 2], run[NUM_ROWS], layer[product + 3]
        call(run[ADD_BIAS], given.ctypes.data)


@jit()
def _add_norm(run: Any, given: Any, states_at: Any, added_at: Any, weight_at: Any, out_at: Any) -> None:
    given[0], given[1], given[2], given[3], given[4] = states_at, added_at, weight_at, out_at, run[EPSILON]
    given[5], given[6] = run[NUM_ROWS], run[HIDDEN]
    call(run[ADD_NORM], given.ctypes.data)


@jit()
def _rotate(run: Any, given: Any, layer: Any) -> None:
    given[0], given[1], given[2] = run[QKV], layer[HEAD_NORMS], run[EPSILON]
    given[3], given[4], given[5], given[6], given[7] = (
        run[COS], run[SIN], run[WRITTEN], layer[KEYS], layer[VALUES],
    )  # fmt: skip
    given[8], given[9], given[10] = run[NUM_ROWS], run[HEADS] + 2 * run[KV_HEADS], run[KV_HEADS]
    given[11], given[12] = run[HEAD_DIM], run[NUM_SLOTS]
    call(run[ROTATE], given.ctypes.data)


@jit()
def _attend(run: Any, given: Any, layer: Any) -> None:
    head_dim, float_bytes = run[HEAD_DIM], 4
    given[0], given[1], given[2], given[3] = 0, run[QKV], layer[KEYS], layer[VALUES]
    given[4], given[5], given[6], given[7] = run[PLACES], run[PARTS], layer[RULE], run[ATTENDED]
    given[8], given[9], given[10] = run[NUM_ROWS], run[HEADS], head_dim
    given[11] = (run[HEADS] + 2 * run[KV_HEADS]) * head_dim * float_bytes
    given[12] = head_dim * float_bytes
    given[13], given[14], given[15] = run[NUM_SLOTS], run[KV_HEADS], run[NUM_PLACES]
    given[16], given[17] = run[NUM_PARTS], layer[WINDOW]
    share(run[POOL] if run[SHARES_ATTENTION] else 0, run[ATTEND], given.ctypes.data)


@jit()
def _gate(run: Any, given: Any) -> None:
    given[0], given[1], given[2] = run[GATE_UP], run[GATED], run[IS_GELU]
    given[3], given[4] = run[NUM_ROWS], run[INNER]
    call(run[GATE], given.ctypes.data)


@jit()
def _keep(run: Any, given: Any, kept_at: Any) -> None:
    given[0], given[1], given[2] = run[STATES], kept_at, run[NUM_ROWS] * run[HIDDEN]
    call(run[COPY], given.ctypes.data)


@c_function(types.void(CALL))
def run_layers(run: Any) -> None:
    """Runs states through layers, in place, but for what the last one adds."""
    given = np.empty(18, np.int64)
    order = carray(pointer(run[ORDER]), run[NUM_LAYERS], np.int64)
    added_at, kept_at = 0, 0
    for index in order:
        layer = carray(pointer(run[LAYERS] + index * NUM_FIELDS * 8), NUM_FIELDS, np.int64)
        _add_norm(run, given, run[STATES], added_at, layer[INPUT_NORM], run[NORMED])
        if kept_at:
            _keep(run, given, kept_at)
        _multiply(run, given, layer, QKV_PRODUCT, run[NORMED], run[QKV])
        _rotate(run, given, layer)
        _attend(run, given, layer)
        added_at = run[ADDED]
        _multiply(run, given, layer, OUTPUT_PRODUCT, run[ATTENDED], added_at)
        if layer[ATTENTION_NORM]:
            _add_norm(run, given, added_at, 0, layer[ATTENTION_NORM], added_at)
        _add_norm(run, given, run[STATES], added_at, layer[MLP_NORM], run[NORMED])
        _multiply(run, given, layer, GATE_UP_PRODUCT, run[NORMED], run[GATE_UP])
        _gate(run, given)
        _multiply(run, given, layer, DOWN_PRODUCT, run[GATED], added_at)
        if layer[DOWN_NORM]:
            _add_norm(run, given, added_at, 0, layer[DOWN_NORM], added_at)
        kept_at = layer[KEPT]
