"""Keys and values in FP8: what is left of them, and that texts over them are cloud-only's over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine_texts import write_texts
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.server.cli import describe_target
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.kernels.fp8 import dequantize, quantize
from outrider.kernels.kv_pool import KVPool

PROMPTS = [[(37 * i + 11 * number) % 300 for i in range(20 + 17 * number)] for number in range(5)]
SAMPLINGS = [SamplingParams(temperature=0.9 * (number % 2), seed=number) for number in range(5)]
NUM_NEW = 20


def test_a_row_is_a_function_of_itself_and_off_by_a_sixteenth_at_most() -> None:
    rows = torch.randn((200, 48), generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-12, 5, 200)[:, None]
    codes, scales = quantize(rows)
    for number, row in enumerate(rows):
        alone = quantize(row)
        assert torch.equal(alone[0], codes[number]) and torch.equal(alone[1], scales[number])
    kept = dequantize(codes, scales, torch.float32)
    least = 2.0**-9 * scales.float()[:, None]  # a number of the smallest is off by half of it
    assert ((kept - rows).abs() <= rows.abs() / 16 + least / 2).all()
    assert (kept != rows).any()
    assert not dequantize(*quantize(torch.zeros(3, 8)), torch.float32).any()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_row(number: float) -> None:
    rows = torch.full((3, 8), 448.0)
    rows[1, 5] = number
    kept = dequantize(*quantize(rows), torch.float32)
    assert kept[1].isnan().all() and torch.equal(kept[[0, 2]], rows[[0, 2]])


def test_later_writes_change_nothing_before_them() -> None:
    pool = KVPool.holding(torch.zeros(2, 4, 2, 8), is_fp8=True)
    pool.write(torch.arange(3), torch.randn(3, 2, 8))
    before = pool.read(slice(0, 3))
    pool.write(torch.tensor([3, 6], dtype=torch.int32), 100 * torch.randn(2, 2, 8))
    assert torch.equal(pool.read(slice(0, 3)), before)
    assert torch.equal(pool.read(torch.tensor([6]))[0], pool.read(slice(6, 7))[0])


@pytest.mark.parametrize(
    ("arch", "dtype", "decoder"),
    [("llama", "float32", "lean"), ("qwen3", "bfloat16", "cuda"), ("mistral", "float32", "transformers")],
)
def test_texts_are_cloud_onlys_alone_beside_others_and_recomputed(
    target_of: Callable[[str], Path], arch: str, dtype: str, decoder: str
) -> None:
    directory = target_of(arch)

    def load(kv_dtype: str) -> Any:
        return load_target(directory, dtype=dtype, kv_dtype=kv_dtype, decoder=decoder, kv_tokens=512)

    backend = load("fp8")
    assert backend.is_reproducible
    expected = write_texts(backend, PROMPTS, SAMPLINGS, NUM_NEW)
    for options in ({}, {"num_together": 4}, {"is_evicted": True}):
        assert write_texts(backend, PROMPTS, SAMPLINGS, NUM_NEW, expected=expected, **options) == expected
    assert write_texts(load("auto"), PROMPTS, SAMPLINGS, NUM_NEW) != expected


def test_a_target_over_fp8_is_another_one_of_half_the_memory(target_of: Callable[[str], Path]) -> None:
    directory = target_of("llama")
    plain, fp8, wide = (
        load_target(directory, dtype=dtype, kv_dtype=kv_dtype, kv_tokens=256, exact_rows="off")
        for dtype, kv_dtype in (("bfloat16", "auto"), ("bfloat16", "fp8"), ("float32", "auto"))
    )
    head_dim = fp8.facts.head_dim
    assert fp8.facts.kv_bytes_per_token / plain.facts.kv_bytes_per_token == (head_dim + 2) / (2 * head_dim)
    allocated = sum(pool.nbytes for pool in fp8.memory.tensors)
    num_slots = (fp8.blocks.num_blocks + 1) * fp8.blocks.block_size  # the spare block too
    assert allocated == num_slots * fp8.facts.kv_bytes_per_token
    assert len({each.fingerprint for each in (plain, fp8, wide)}) == 3
    assert (fp8.kv_dtype, plain.kv_dtype) == ("fp8", "bfloat16")
    assert "tokens in FP8" in describe_target(fp8) and "FP8" not in describe_target(plain)


def test_an_unknown_dtype_is_refused(target_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="kv_dtype 'int8' is not one of auto, fp8"):
        load_target(target_of("llama"), kv_dtype="int8")
