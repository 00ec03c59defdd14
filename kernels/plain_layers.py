"""What a decoder layer does beside its products and its attention, in torch: `outrider.kernels.layers` on any device.

Everything is computed in float32 and rounded once, when it is written; a row's numbers depend on no other row.
"""

from __future__ import annotations

import math

import torch

from outrider.kernels.kv_pool import KVPool


def add_norm(
    states: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """Adds `added` (None: nothing) to the states, and writes states / √(mean(states²) + ε) · weight to `out`.

    All but the weight [size] are [rows, size], contiguous, of one dtype; `out` may be the states.
    """
    if added is not None:
        states.add_(added)
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    out.copy_(wide * weight.float())


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
    """Rotates queries in place and keys into the pool, where values are copied to.

    `qkv` is [rows, heads + 2 · kv_heads, head_dim], contiguous; `cos` and `sin` are float32 [rows, head_dim / 2]; with
    `norms` [2, head_dim] queries and keys are normalised before, by its first and second row. Row i is written to
    slot `slots[i]` of the pools. Of rows with one slot any is left there.
    """
    num_kv_heads, half = key_pool.num_kv_heads, qkv.shape[2] // 2
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    wide = qkv[:, :-num_kv_heads].float()
    if norms is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        wide[:, :num_heads] *= norms[0].float()
        wide[:, num_heads:] *= norms[1].float()
    first, second, cos, sin = wide[..., :half], wide[..., half:], cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    qkv[:, :num_heads] = rotated[:, :num_heads]
    key_pool.write(slots, rotated[:, num_heads:].to(qkv.dtype))
    value_pool.write(slots, qkv[:, -num_kv_heads:])


def gate(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes activation(gate) · up to `out` [rows, size], where `gate_up` [rows, 2 · size] has first the gates.

    `activation` is "silu", x / (1 + e⁻ˣ), or "gelu_tanh", which is x / (1 + e⁻ᵗ) for t = √(8/π) (x + 0.044715 x³).
    """
    gates, ups = gate_up.float().chunk(2, dim=-1)
    inner = gates
    if activation == "gelu_tanh":
        inner = math.sqrt(8 / math.pi) * (gates + 0.044715 * gates * gates * gates)
    out.copy_(gates / (1.0 + torch.exp(-inner)) * ups)
