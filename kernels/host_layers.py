"""What a decoder layer does beside its products and its attention, for a CPU, in float32: numba's kernels.

Importing this module needs numba. `outrider.kernels.plain_layers` is the same in torch, of any dtype, and says what
each computes.
"""

from __future__ import annotations

import torch

from outrider.kernels.host.layers import add_norm_rows, gate_rows, rotate_rows
from outrider.kernels.kv_pool import KVPool


def add_norm(
    states: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """Adds `added` to the states [rows, size], and writes their norm to `out` (`plain_layers.add_norm`)."""
    x = states.numpy()
    more = x if added is None else added.numpy()
    add_norm_rows(x, more, added is not None, weight.numpy(), epsilon, out.numpy())


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
    pools = (qkv[:0] if is_fp8 else pool.rows.flatten(0, 1) for pool in (key_pool, value_pool))
    rotate_rows(
        qkv.numpy(), (cos[:0] if norms is None else norms).numpy(), epsilon, cos.numpy(), sin.numpy(),
        slots.numpy(), num_kv_heads, *(pool.numpy() for pool in pools),
    )  # fmt: skip
    if is_fp8:
        key_pool.write(slots, qkv[:, -2 * num_kv_heads : -num_kv_heads])
        value_pool.write(slots, qkv[:, -num_kv_heads:])


def gate(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes activation(gate) · up to `out` [rows, size] (`plain_layers.gate`)."""
    gate_rows(gate_up.numpy(), activation == "gelu_tanh", out.numpy())
