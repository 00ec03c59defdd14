"""The paged attention kernel on a GPU: its values and its bits, chains and trees in one batch.

A rehearsal runs these on a CPU by Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from support.devices import GPU_DEVICE, ON_GPU

IS_REHEARSAL = GPU_DEVICE != "cuda"
SPLIT = 64 if IS_REHEARSAL else 512

pytest.importorskip("triton")
from benchmarks.gpu_check.attention_cases import (  # noqa: E402
    MAX_ERROR,
    RULES,
    LengthSplits,
    Sizes,
    changed_rows,
    random_batch,
)

SIZES = [Sizes(3, 1)] if IS_REHEARSAL else [Sizes(6, 2, 64), Sizes(4, 2, 80, 4)]

pytestmark = ON_GPU


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chains_and_trees_have_the_attention_of_float64(sizes: Sizes, dtype: torch.dtype) -> None:
    for seed in range(1 if IS_REHEARSAL else 8):
        batch = random_batch(sizes, dtype, GPU_DEVICE, seed, longest=160 if IS_REHEARSAL else 1500)
        assert batch.error(sizes.planner(GPU_DEVICE, SPLIT), RULES[seed % len(RULES)]) <= MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rows_bits_are_its_own(sizes: Sizes, dtype: torch.dtype) -> None:
    changed = changed_rows(sizes.planner(GPU_DEVICE, SPLIT), sizes, dtype, GPU_DEVICE, SPLIT)
    assert set(changed.values()) == {0}, changed


def test_splits_by_a_sessions_length_are_caught() -> None:
    changed = changed_rows(
        LengthSplits(SIZES[0], GPU_DEVICE, SPLIT), SIZES[0], torch.float32, GPU_DEVICE, SPLIT
    )
    assert changed["all queries"] and changed["a path of a tree"], changed
