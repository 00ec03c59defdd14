"""The verifier on a GPU: kernels as on the host, texts as cloud-only, and devices beside the first.

`python -m benchmarks.gpu_check --rehearse` runs these on a CPU, the kernels by Triton's interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.devices import GPU_DEVICE, ON_GPU

from benchmarks.engine_texts import write_texts
from benchmarks.gpu_check.texts import SAMPLINGS
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.verification.device_rows import make_device_rows
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
from outrider.cloud_verifier.verification.rows import HostRows, StepRound
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.models import EMBEDDED

IS_REHEARSAL = GPU_DEVICE != "cuda"
PROMPTS = [tuple(range(5, 5 + length)) for length in (7, 40, 19, 3)]
NUM_NEW = 4 if IS_REHEARSAL else 48
VOCAB_SIZE = 1090 if IS_REHEARSAL else 151_665

pytestmark = ON_GPU


@pytest.fixture(scope="module", autouse=True)
def _interpreted_in_few_tiles() -> Iterator[None]:
    device = pytest.importorskip("outrider.kernels.device", reason="no Triton")
    device_truncation = importlib.import_module("outrider.kernels.device_truncation")
    before = device.SPAN, device.TILE_BLOCKS, device_truncation.NUM_PIVOTS, device_truncation.TILE
    if IS_REHEARSAL:
        device.SPAN, device.TILE_BLOCKS = 8192, 1024
        device_truncation.NUM_PIVOTS, device_truncation.TILE = 32, 8192
    yield
    device.SPAN, device.TILE_BLOCKS, device_truncation.NUM_PIVOTS, device_truncation.TILE = before


@pytest.fixture(scope="module")
def backend() -> PagedBackend:
    return load(GPU_DEVICE)


def load(device: str) -> PagedBackend:
    backend = load_target(
        EMBEDDED / "target", device=device, dtype="float32", kv_tokens=16_384, decoder="cuda"
    )
    if IS_REHEARSAL:
        backend.has_device_logits = True
    return backend


@pytest.mark.parametrize("number", range(6))
def test_samples_residuals_and_thresholds_are_the_hosts(number: int) -> None:
    from benchmarks.gpu_check.kernels import CUTS, Wrong, compare, make_chunk

    num_rows = 3 if IS_REHEARSAL else 64
    chunk = make_chunk(GPU_DEVICE, VOCAB_SIZE, num_rows, CUTS[number % len(CUTS)], number)
    assert compare(load_row_kernels(), chunk) == Wrong()


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.1, 3.0])
def test_the_one_id_that_is_kept_is_the_largest(temperature: float) -> None:
    """A threshold is a score, so that both must be the same to the last bit."""
    num_rows = 2 if IS_REHEARSAL else 64
    logits = torch.from_numpy(
        np.random.default_rng(0).normal(size=(num_rows, VOCAB_SIZE)).astype(np.float32) * 9
    )
    sampling = SamplingParams(temperature=temperature, top_k=1, seed=5)
    rounds = [StepRound(sampling, 9, (), (), (7,) * (num_rows - 1))]
    (rows,) = make_device_rows(logits.to(GPU_DEVICE), rounds, (), VOCAB_SIZE)
    assert [rows.target_sample(row) for row in range(num_rows)] == logits.argmax(1).tolist()


def test_penalised_rows_are_those_of_the_host() -> None:
    logits = (np.random.default_rng(0).normal(size=(3, VOCAB_SIZE)) * 3).astype(np.float32)
    sampling = SamplingParams(
        seed=4, repetition_penalty=1.3, presence_penalty=0.2, top_k=40, logit_bias=((9, 8.0),)
    )
    step_round = StepRound(sampling, 25, (1, 2), (3, 3), (4, 5))
    (found,) = make_device_rows(torch.from_numpy(logits).to(GPU_DEVICE), [step_round], (0,), VOCAB_SIZE - 3)
    host = HostRows(logits, step_round, (0,), VOCAB_SIZE - 3)
    for row in range(3):
        assert found.target_sample(row) == host.target_sample(row)
        np.testing.assert_allclose(found.log_probs(row, (4, 9)), host.log_probs(row, (4, 9)), atol=2e-5)
        assert found.entropy(row) == pytest.approx(host.entropy(row), abs=1e-4)


def texts_of(backend: PagedBackend) -> list[list[int]]:
    """Cloud-only texts, each session alone, which the other ways must give too."""
    samplings = [replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i) for i in range(len(PROMPTS))]
    alone = [write_texts(backend, [p], [s], NUM_NEW)[0] for p, s in zip(PROMPTS, samplings, strict=True)]
    num = len(PROMPTS)
    for is_evicted in (False, True):
        texts = write_texts(
            backend, PROMPTS, samplings, NUM_NEW, expected=alone, num_together=num, is_evicted=is_evicted
        )
        assert texts == alone
    assert write_texts(backend, PROMPTS, samplings, NUM_NEW, num_together=num) == alone
    return alone


def test_verified_evicted_and_batched_texts_are_cloud_only_in_float32(backend: PagedBackend) -> None:
    assert backend.has_device_logits, "the kernels were not used: the log says why"
    texts_of(backend)
    if not IS_REHEARSAL:
        assert backend.has_paged_kernel and backend.decoder.num_graphs, "the log says why"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_gives_the_texts_of_the_first(backend: PagedBackend) -> None:
    second = load("cuda:1")
    assert second.has_device_logits and torch.cuda.current_device() == 0
    assert texts_of(second) == texts_of(backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ModelError, match=rf"'cuda:{count}' does not exist: {count} CUDA device"):
        load(f"cuda:{count}")
