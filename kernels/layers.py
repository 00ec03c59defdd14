"""What a decoder layer does beside its products and its attention, for CUDA, in Triton: one launch each.

`outrider.kernels.plain_layers` is the same in torch, and says what each computes. A program reads one row, or one head
of it, so that a row's bits follow from the row alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from outrider.kernels.device_fp8 import encode, row_scale
from outrider.kernels.kv_pool import KVPool

GATE_SIZE = 1024  # numbers a program of `gate` writes
# t = gelu's inner polynomial, of which a sigmoid is taken.
_GELU_SCALE, _GELU_CUBE = tl.constexpr(math.sqrt(8 / math.pi)), tl.constexpr(0.044715)
_MOST_EXPONENT = tl.constexpr(88.0)  # of a finite float32


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    states, added, weight, epsilon, out, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, HAS_ADDED: tl.constexpr
):  # fmt: skip
    """Runs program (row)."""
    column = tl.arange(0, PADDED_SIZE)
    is_read = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(states + at, mask=is_read, other=0.0)
    if HAS_ADDED:
        x = (x.to(tl.float32) + tl.load(added + at, mask=is_read, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(states + at, x, mask=is_read)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    normed = wide * scale * tl.load(weight + column, mask=is_read, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=is_read)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    qkv, norms, epsilon, cos, sin, slots, key_pool, value_pool, key_scales, value_scales,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Runs program (row, head): the heads of queries, then those of keys, each with its values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, PADDED_HALF)
    is_read = dim < HALF
    at = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + dim
    first = tl.load(at, mask=is_read, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_read, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weight = norms + (head >= NUM_HEADS).to(tl.int32) * (2 * HALF) + dim
        scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / (2 * HALF) + epsilon)
        first *= scale * tl.load(weight, mask=is_read, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF, mask=is_read, other=0.0).to(tl.float32)
    turn = row * HALF + dim
    c, s = tl.load(cos + turn, mask=is_read, other=0.0), tl.load(sin + turn, mask=is_read, other=0.0)
    dtype = qkv.dtype.element_ty
    turned_first = (first * c - second * s).to(dtype)
    turned_second = (second * c + first * s).to(dtype)
    if head < NUM_HEADS:
        tl.store(at, turned_first, mask=is_read)
        tl.store(at + HALF, turned_second, mask=is_read)
    else:
        place = tl.load(slots + row).to(tl.int64) * NUM_KV_HEADS + head - NUM_HEADS
        _store_head(key_pool, key_scales, place, dim, turned_first, turned_second, HALF, HAS_SCALES)
        value = at + NUM_KV_HEADS * 2 * HALF
        first_value = tl.load(value, mask=is_read, other=0.0)
        second_value = tl.load(value + HALF, mask=is_read, other=0.0)
        _store_head(value_pool, value_scales, place, dim, first_value, second_value, HALF, HAS_SCALES)


@triton.jit  # type: ignore[untyped-decorator]
def _store_head(  # type: ignore[no-untyped-def]
    pool, scales, place, dim, first, second, HALF: tl.constexpr, HAS_SCALES: tl.constexpr
):  # fmt: skip
    """Writes both halves of a head to its place among a pool's heads."""
    is_kept = dim < HALF
    at = pool + place * (2 * HALF) + dim
    if HAS_SCALES:
        first, second = first.to(tl.float32), second.to(tl.float32)
        # A maximum of two numbers drops one that is NaN; a sum keeps it.
        either = tl.maximum(tl.abs(first), tl.abs(second)) + (first - first) + (second - second)
        either = tl.where(is_kept, either, 0.0)
        scale = row_scale(tl.max(either, 0) + tl.sum(either - either, 0))
        tl.store(scales + place, scale)
        first, second = encode(first, scale), encode(second, scale)
    tl.store(at, first, mask=is_kept)
    tl.store(at + HALF, second, mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate_up, out, SIZE: tl.constexpr, GATE_SIZE: tl.constexpr, IS_GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Runs program (row, part of it)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * GATE_SIZE + tl.arange(0, GATE_SIZE)
    is_read = column < SIZE
    at = gate_up + row * (2 * SIZE) + column
    x = tl.load(at, mask=is_read, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=is_read, other=0.0).to(tl.float32)
    inner = x
    if IS_GELU:
        inner = _GELU_SCALE * (x + _GELU_CUBE * x * x * x)
    gated = x / (1.0 + tl.exp(tl.minimum(-inner, _MOST_EXPONENT))) * up
    tl.store(out + row * SIZE + column, gated.to(out.dtype.element_ty), mask=is_read)


def add_norm(
    states: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """Adds `added` to the states [rows, size], and writes their norm to `out` (`plain_layers.add_norm`)."""
    num_rows, size = states.shape
    assert states.is_contiguous() and out.is_contiguous() and (added is None or added.is_contiguous())
    # Triton launches on the current device, wherever its tensors are.
    with torch.cuda.device_of(states):  # type: ignore[no-untyped-call]
        _add_norm[(num_rows,)](
            states, states if added is None else added, weight, epsilon, out,
            SIZE=size, PADDED_SIZE=triton.next_power_of_2(size), HAS_ADDED=added is not None,
            num_warps=num_warps(size),
        )  # fmt: skip


def num_warps(size: int) -> int:
    """Returns the warps for a row: at most 16 numbers a thread."""
    return min(16, max(4, int(triton.next_power_of_2(size)) // 512))


def rotate(
    qkv: torch.Tensor,
    norms: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_pool: KVPool,
    value_pool: KVPool,
) -> None:
    """Rotates queries in place, and keys into the pool, where values are copied to (`plain_layers.rotate`)."""
    num_kv_heads, half = key_pool.num_kv_heads, qkv.shape[2] // 2
    num_rows, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads
    (keys, key_scales), (values, value_scales) = key_pool.operands, value_pool.operands
    assert all(each.is_contiguous() for each in (qkv, cos, sin, slots, keys, values)), "other strides"
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        _rotate[(num_rows, num_heads + num_kv_heads)](
            qkv, qkv if norms is None else norms, epsilon, cos, sin, slots,
            keys, values, key_scales, value_scales,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, PADDED_HALF=triton.next_power_of_2(half),
            HAS_NORMS=norms is not None, HAS_SCALES=key_pool.scales is not None, num_warps=1,
        )  # fmt: skip


def gate(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes activation(gate) · up to `out` [rows, size] (`plain_layers.gate`)."""
    num_rows, size = out.shape
    assert gate_up.is_contiguous() and out.is_contiguous() and activation in ("silu", "gelu_tanh")
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        _gate[(num_rows, triton.cdiv(size, GATE_SIZE))](
            gate_up, out, SIZE=size, GATE_SIZE=GATE_SIZE, IS_GELU=activation == "gelu_tanh"
        )
