"""What a decoder layer does beside its products and its attention, for a CPU, in float32: numba's kernels.

Importing this module needs numba. `outrider.kernels.plain_layers` is the same in torch, of any dtype, and says what
each computes.
"""

from __future__ import annotations

import functools

import torch

from outrider.kernels.host.layers import add_norm_rows, gate_rows, rotate_rows
from outrider.kernels.host.threads import run_c
from outrider.kernels.kv_pool import KVPool


def add_norm(
    states: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """Adds `added` to the states [rows, size], and writes their norm to `out` (`plain_layers.add_norm`)."""
    places = at(states), 0 if added is None else at(added), at(weight), at(out)
    run_c(add_norm_rows, *places, float_at(epsilon), *states.shape)


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
    """Rotates queries and keys in place, and copies keys and values to the pool (`plain_layers.rotate`)."""
    num_kv_heads = key_pool.num_kv_heads
    is_fp8 = key_pool.scales is not None
    places = at(qkv), 0 if norms is None else at(norms), float_at(epsilon), at(cos), at(sin)
    pools = (0, 0) if is_fp8 else (at(key_pool.rows), at(value_pool.rows))
    sizes = *qkv.shape[:2], num_kv_heads, qkv.shape[2], key_pool.num_slots
    run_c(rotate_rows, *places, at(slots, torch.int64), *pools, *sizes)
    if is_fp8:
        key_pool.write(slots, qkv[:, -2 * num_kv_heads : -num_kv_heads])
        value_pool.write(slots, qkv[:, -num_kv_heads:])


def gate(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes activation(gate) · up to `out` [rows, size] (`plain_layers.gate`)."""
    run_c(gate_rows, at(gate_up), at(out), int(activation == "gelu_tanh"), *out.shape)


def at(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Returns the address of a tensor's numbers, which follow one another there."""
    assert tensor.dtype == dtype and tensor.is_contiguous(), "a kernel is given addresses alone"
    return tensor.data_ptr()


def float_at(number: float) -> int:
    """Returns where a number lies as float32, as long as the process lives."""
    return _kept(number).data_ptr()


@functools.cache
def _kept(number: float) -> torch.Tensor:
    return torch.tensor([number])
