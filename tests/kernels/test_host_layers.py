"""The kernels of a decoder layer on a CPU: the numbers of their plain forms, and a row's bits from the row alone."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import host_layers, plain_layers
from outrider.kernels.kv_pool import KVPool

NUM_HEADS, NUM_KV_HEADS = 6, 2
SIZES = [24, 64, 70]  # of heads among others: a register's multiple, and not
TOLERANCE = {"atol": 4e-6, "rtol": 4e-6}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 70, 384])
@pytest.mark.parametrize("has_added", [True, False])
def test_states_are_added_up_and_normalised(size: int, has_added: bool) -> None:
    found, expected = random(3, size), random(3, size)
    added = random(3, size, seed=1) if has_added else None
    weight, out, plain_out = random(size, seed=2), torch.empty(3, size), torch.empty(3, size)
    host_layers.add_norm(found, added, weight, 1e-3, out)
    plain_layers.add_norm(expected, added, weight, 1e-3, plain_out)
    assert torch.equal(found, expected)
    torch.testing.assert_close(out, plain_out, **TOLERANCE)
    host_layers.add_norm(found, None, weight, 1e-3, found)
    assert torch.equal(found, out), "in place"


def rotated(
    kernels: object, head_dim: int, *, has_norms: bool, is_fp8: bool = False, num_rows: int = 4
) -> tuple[torch.Tensor, list[KVPool]]:
    qkv = random(5, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim)[:num_rows]
    angles = random(5, head_dim // 2, seed=3)[:num_rows]
    norms = random(2, head_dim, seed=4) if has_norms else None
    slots = torch.tensor([9, 2, 0, 14, 5])[:num_rows]
    pools = [KVPool.holding(torch.full((4, 4, NUM_KV_HEADS, head_dim), 7.0), is_fp8=is_fp8) for _ in range(2)]
    kernels.rotate(qkv, norms, 1e-3, angles.cos(), angles.sin(), slots, *pools)  # type: ignore[attr-defined]
    return qkv[:, :NUM_HEADS], pools


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_queries_are_rotated_and_keys_and_values_are_in_their_slots(
    head_dim: int, has_norms: bool, is_fp8: bool
) -> None:
    """A last bit of a key before it is rounded to FP8 is a step of FP8 after."""
    ours, plain = (
        rotated(kernels, head_dim, has_norms=has_norms, is_fp8=is_fp8)
        for kernels in (host_layers, plain_layers)
    )
    torch.testing.assert_close(ours[0], plain[0], **TOLERANCE)
    for found, expected in zip(ours[1], plain[1], strict=True):
        tolerance = {"atol": 1e-3, "rtol": 0.13} if is_fp8 else TOLERANCE
        torch.testing.assert_close(found.read(slice(None)), expected.read(slice(None)), **tolerance)
        written = (found.read(slice(None)) != 7.0).any(dim=(1, 2)).nonzero().flatten().tolist()
        assert written == [0, 2, 9, 14]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_multiply(activation: str) -> None:
    """Gates whose exponential is no finite number among them."""
    gate_up = 4 * random(2, 2 * 1100)
    gate_up[0, 0], gate_up[0, 1], gate_up[0, 2] = 300.0, -300.0, torch.inf
    found, expected = torch.empty(2, 1100), torch.empty(2, 1100)
    host_layers.gate(gate_up, activation, found)
    plain_layers.gate(gate_up, activation, expected)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_has_its_bits_beside_any_others(number: float) -> None:
    states, gate_up = random(5, 70), random(5, 140)
    states[4], gate_up[4] = number, number
    normed, gated = torch.empty(5, 70), torch.empty(5, 70)
    host_layers.add_norm(states, None, random(70, seed=2), 1e-3, normed)
    host_layers.gate(gate_up, "silu", gated)
    assert normed[4].isnan().all() and not gated[4].isfinite().any()
    for row in range(4):
        alone, alone_gated = torch.empty(1, 70), torch.empty(1, 70)
        host_layers.add_norm(states[row : row + 1], None, random(70, seed=2), 1e-3, alone)
        host_layers.gate(gate_up[row : row + 1], "silu", alone_gated)
        assert torch.equal(alone[0], normed[row]) and torch.equal(alone_gated[0], gated[row])
    several = rotated(host_layers, 24, has_norms=True, num_rows=5)
    single = rotated(host_layers, 24, has_norms=True, num_rows=1)
    assert torch.equal(several[0][:1], single[0])
    assert torch.equal(several[1][0].rows.flatten(0, 1)[9], single[1][0].rows.flatten(0, 1)[9])
