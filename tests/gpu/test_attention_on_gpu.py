"""The paged attention kernel on a GPU: its values and its bits, chains and trees in one batch.

A rehearsal runs these on a CPU by Triton's interpreter.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support.devices import GPU_DEVICE, ON_GPU

IS_REHEARSAL = GPU_DEVICE != "cuda"
SPLIT = 64 if IS_REHEARSAL else 512
# The interpreter is slow, and tests/kernels/attention_cases.py has the other dtypes.
DTYPES = (torch.float32,) if IS_REHEARSAL else (torch.float32, torch.bfloat16, torch.float16)
# Heads, KV heads, head_dim, tokens of a block: the embedded target's, and sizes that are no powers of two.
SIZES = [(3, 1, 16, 16)] if IS_REHEARSAL else [(6, 2, 64, 16), (4, 2, 80, 4)]

pytestmark = ON_GPU


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    pytest.importorskip("triton")
    from benchmarks.gpu_check import attention_cases

    return attention_cases


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chains_and_trees_have_the_attention_of_float64(
    cases: ModuleType, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    of = cases.Sizes(*sizes)
    for seed in range(1 if IS_REHEARSAL else 8):
        rule = cases.RULES[seed % len(cases.RULES)]
        batch = cases.random_batch(of, dtype, GPU_DEVICE, seed, longest=160 if IS_REHEARSAL else 1500)
        assert batch.error(of.planner(GPU_DEVICE, SPLIT), rule) <= cases.MAX_ERROR[dtype], rule


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rows_bits_are_its_own(cases: ModuleType, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    of = cases.Sizes(*sizes)
    changed = cases.changed_rows(of.planner(GPU_DEVICE, SPLIT), of, dtype, GPU_DEVICE, SPLIT)
    assert set(changed.values()) == {0}, changed


def test_splits_by_a_sessions_length_are_caught(cases: ModuleType) -> None:
    of = cases.Sizes(*SIZES[0])
    planner = cases.LengthSplits(of, GPU_DEVICE, SPLIT)
    changed = cases.changed_rows(planner, of, torch.float32, GPU_DEVICE, SPLIT)
    assert changed["all queries"] and changed["a path of a tree"], changed
