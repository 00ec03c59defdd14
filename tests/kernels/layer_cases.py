"""The kernels of a decoder layer under Triton's interpreter, on CPU tensors: the numbers of their plain forms.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import layers, plain_layers
from outrider.kernels.kv_pool import KVPool

DTYPES = [torch.float32, torch.bfloat16]
# The interpreter rounds towards zero to bfloat16: a last bit for each of two roundings.
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-3, "rtol": 1.6e-2}}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_added", [True, False])
def test_states_are_added_up_and_normalised(dtype: torch.dtype, has_added: bool) -> None:
    """A size that is no power of two; the norm's weight in float32, as Gemma's is."""
    found, expected = random(3, 70, dtype=dtype), random(3, 70, dtype=dtype)
    added = random(3, 70, dtype=dtype, seed=1) if has_added else None
    weight = random(70, seed=2)
    out, plain_out = torch.empty_like(found), torch.empty_like(expected)
    layers.add_norm(found, added, weight, 1e-3, out)
    plain_layers.add_norm(expected, added, weight, 1e-3, plain_out)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(out, plain_out, **TOLERANCE[dtype])
    layers.add_norm(found, None, weight, 1e-3, found)
    torch.testing.assert_close(found, out, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [True, False])
def test_queries_are_rotated_and_keys_and_values_are_in_their_slots(
    dtype: torch.dtype, has_norms: bool
) -> None:
    num_heads, num_kv_heads, head_dim = 6, 2, 24
    angles = random(4, head_dim // 2, seed=3)
    norms = random(2, head_dim, dtype=dtype, seed=4) if has_norms else None
    slots = torch.tensor([9, 2, 0, 14], dtype=torch.int32)
    found = []
    for kernels in (layers, plain_layers):
        qkv = random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        pools = [KVPool(torch.full((4, 4, num_kv_heads, head_dim), 7.0, dtype=dtype)) for _ in range(2)]
        kernels.rotate(qkv, norms, 1e-3, angles.cos(), angles.sin(), slots, *pools)
        found.append((qkv[:, :num_heads], *(pool.rows for pool in pools)))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, **TOLERANCE[dtype])
    keys = found[0][1].flatten(0, 1)
    assert not (keys[slots] == 7.0).any() and (keys == 7.0).sum() == 12 * num_kv_heads * head_dim


def test_a_rotation_turns_the_pairs_of_a_head() -> None:
    qkv = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(1, 3, 1)
    turns = torch.tensor([[0.0, 0.6]]), torch.tensor([[1.0, 0.8]])
    pools = KVPool(torch.zeros(1, 1, 1, 4)), KVPool(torch.zeros(1, 1, 1, 4))
    layers.rotate(qkv, None, 0.0, *turns, torch.tensor([0]), *pools)
    rotated = [-3.0, 2 * 0.6 - 4 * 0.8, 1.0, 4 * 0.6 + 2 * 0.8]
    assert torch.allclose(qkv[0, 0], torch.tensor(rotated)) and torch.allclose(
        qkv[0, 0], pools[0].rows[0, 0, 0]
    )
    assert pools[1].rows.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # the interpreter is numpy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_in_fp8_have_the_bits_of_the_plain_form(dtype: torch.dtype) -> None:
    """Heads of very different sizes, of zeros, and with numbers that are not finite. A rotation by nothing."""
    num_rows, num_kv_heads, head_dim = 9, 2, 24
    sizes = torch.tensor([1.0, 1e-3, 300.0, 1e-9, 0.0, 7.0, 1e6, 1.0, 1.0])
    found, bits = [], []
    for kernels in (layers, plain_layers):
        qkv = (random(num_rows, 4 + 2 * num_kv_heads, head_dim) * sizes[:, None, None]).to(dtype)
        qkv[7, 4, 3], qkv[7, 7, 20], qkv[8, 5, 0] = torch.nan, torch.nan, torch.inf
        pools = [KVPool.holding(torch.ones(4, 4, num_kv_heads, head_dim), is_fp8=True) for _ in range(2)]
        turns = torch.ones(num_rows, head_dim // 2), torch.zeros(num_rows, head_dim // 2)
        slots = torch.tensor([9, 2, 0, 14, 3, 5, 6, 7, 8], dtype=torch.int32)
        kernels.rotate(qkv, None, 0.0, *turns, slots, *pools)
        found.append([pool.read(slice(None)) for pool in pools])
        bits.append([pool.rows.flatten(0, 1)[slots[:7].long()] for pool in pools])
        written = pools[0].read(slots.long())
        torch.testing.assert_close(written[:7], qkv[:7, 4:6].float(), rtol=0.07, atol=1e-6)
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours.nan_to_num(1e9), plain.nan_to_num(1e9))
    assert all(map(torch.equal, *bits)), "zeros have signs, too"
    keys, values = found[0]
    assert keys[7, 0].isnan().all() and values[7, 1].isnan().all() and keys[8, 1].isnan().all()
    assert keys[7, 1].isfinite().all() and (keys.isnan().sum() + values.isnan().sum()) == 3 * head_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "of"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gates_multiply(dtype: torch.dtype, activation: str, of: torch.nn.Module) -> None:
    gate_up = 4 * random(2, 2 * 1100, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = 300.0, -300.0
    expected = (of(gate_up[:, :1100].float()) * gate_up[:, 1100:].float()).to(dtype)
    for kernels in (layers, plain_layers):
        out = gate_up.new_empty((2, 1100))
        kernels.gate(gate_up, activation, out)
        torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
