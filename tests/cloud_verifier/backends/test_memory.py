"""The KV pool by free memory, and what is refused where there is too little: a CUDA device's memory is made up."""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import ARCHITECTURES
from transformers.utils import logging as hf_logging

from outrider.cloud_verifier.backends import memory
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.cloud_verifier.backends.loading import load_target, make_backend
from outrider.cloud_verifier.backends.memory import check_weights_fit, kv_pool_bytes, step_bytes
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.pool_memory import PoolMemory
from outrider.cloud_verifier.backends.through_transformers import (
    TransformersDecoder,
    load_directly,
    load_through_transformers,
)
from outrider.cloud_verifier.backends.weights import Weights
from outrider.cloud_verifier.config import ServeConfig, check_device_name, parse_kv_memory
from outrider.cloud_verifier.server.cli import describe_target
from outrider.common.config.units import show_size
from outrider.common.errors import ConfigError, ModelError
from outrider.common.process.quiet_loading import quiet_loading

GIB = 2**30
LARGE_PAGE = 2 << 20


@pytest.fixture(scope="module")
def backend(target_of: Callable[[str], Path]) -> PagedBackend:
    return load_target(target_of("llama"), exact_rows="off", kv_tokens=512)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Says how many GiB a device has free, and in all."""

    def set_memory(free: float, total: float) -> None:
        monkeypatch.setattr(memory, "device_memory", lambda device: (int(free * GIB), int(total * GIB)))

    return set_memory


def seven_b(backend: PagedBackend) -> TargetFacts:
    """Facts of Qwen2.5-7B's shape on a GPU."""
    sizes = {"num_layers": 28, "num_heads": 28, "num_kv_heads": 4, "head_dim": 128, "vocab_size": 152_064}
    return replace(backend.facts, device="cuda:1", dtype="bfloat16", model_id="7B", **sizes)


def test_on_a_cpu_the_pool_is_512_mib_unless_a_size_is_given(backend: PagedBackend) -> None:
    facts, decoder = backend.facts, backend.decoder
    assert kv_pool_bytes(facts, decoder, None, 512) == 512 << 20
    assert kv_pool_bytes(facts, decoder, 5 << 30, 512) == 5 << 30


def test_the_start_line_says_what_the_pool_holds_and_the_memory(
    backend: PagedBackend, target_of: Callable[[str], Path]
) -> None:
    per_token = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, bytes
    assert backend.num_kv_bytes == 512 * per_token
    words = describe_target(backend)
    assert ", KV pool of 512 tokens; weights " in words and ", KV 768KiB, peak " in words
    weights = sum(each.numel() * 4 for each in load_file(target_of("llama") / "model.safetensors").values())
    assert f"; weights {show_size(weights)}, " in words and words.endswith(" resident)")


def test_on_cuda_the_start_line_says_what_torch_allocated_and_reserved(
    backend: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("allocated", 5 << 30), ("reserved", 6 << 30)):
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda _, size=size: size)
    monkeypatch.setattr(backend, "device", "cuda:1")
    assert describe_target(backend).endswith(", KV 768KiB, peak 5GiB allocated, 6GiB reserved)")


def test_on_cuda_the_pool_is_what_is_free_beside_weights_and_a_step(
    backend: PagedBackend, on_gpu: Callable[[float, float], None]
) -> None:
    on_gpu(125, 140)
    facts = seven_b(backend)
    step = step_bytes(facts, 0, 512)
    assert 3.0 < step / GIB < 3.5, "512 rows of 152k logits, most of it"
    pool = kv_pool_bytes(facts, backend.decoder, None, 512)
    assert pool == 125 * GIB - step - 7 * GIB
    assert kv_pool_bytes(facts, backend.decoder, None, 64) > pool
    assert kv_pool_bytes(facts, backend.decoder, 24 << 30, 512) == 24 << 30
    assert step_bytes(facts, 3584 * 152_064, 1) == 2 * 3584 * 152_064 * 2, "the start's check of the head"
    assert kv_pool_bytes(facts, backend.decoder, None, 512, heads_bytes=3 * GIB) == pool - 3 * GIB


def test_a_pool_that_does_not_fit_is_refused_by_the_flags_name(
    backend: PagedBackend, on_gpu: Callable[[float, float], None], caplog: pytest.LogCaptureFixture
) -> None:
    facts, decoder = seven_b(backend), backend.decoder
    on_gpu(8, 24)
    refusal = r"--kv-memory 9GiB: cuda:1 has 8GiB free beside the weights of 7B; auto would take 3\.\d+GiB"
    with pytest.raises(ModelError, match=refusal):
        kv_pool_bytes(facts, decoder, 9 << 30, 512)
    with caplog.at_level(logging.WARNING, "outrider"):
        assert kv_pool_bytes(facts, decoder, 7 << 30, 512) == 7 << 30
    assert "--kv-memory 7GiB may be too much" in caplog.text and "--max-step-tokens" in caplog.text
    on_gpu(2, 24)
    with pytest.raises(
        ModelError, match=r"no memory is left for KV.* 512 tokens \(--max-step-tokens\) takes"
    ):
        kv_pool_bytes(facts, decoder, None, 512)
    on_gpu(8, 24)
    with pytest.raises(
        ModelError, match=r"no memory is left for KV.*, and --heads with --draft-kv-memory 6GiB"
    ):
        kv_pool_bytes(facts, decoder, None, 512, heads_bytes=6 * GIB)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    on_gpu: Callable[[float, float], None],
) -> None:
    on_gpu(8, 24)
    check_weights_fit(7 * GIB, "7B", "bfloat16", "cuda:1")
    check_weights_fit(9 * GIB, "7B", "bfloat16", "cpu")
    with pytest.raises(
        ModelError, match=r"7B take 14.2GiB in bfloat16; cuda:1 has 8GiB free of 24GiB: .*--device"
    ):
        check_weights_fit(int(14.2 * GIB), "7B", "bfloat16", "cuda:1")


def test_a_pool_that_cannot_be_allocated_names_the_flag(
    backend: PagedBackend, target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"--kv-memory: there is no memory for a KV pool of"):
        make_backend(backend.decoder, backend.facts, kv_bytes=1 << 60)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Weights, "read", full)
    for decoder in ("lean", "cuda", "transformers"):
        if decoder == "transformers":
            monkeypatch.setattr(
                "outrider.cloud_verifier.backends.through_transformers.load_through_transformers", full
            )
        with pytest.raises(
            ModelError, match=r"weights of .*llama.* do not fit on cpu: out of memory; .*--device"
        ):
            load_target(target_of("llama"), decoder=decoder)


def test_progress_is_of_all_the_weights_read_in_order(target_of: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_target(
        target_of("qwen2"),
        dtype="bfloat16",
        kv_tokens=256,
        exact_rows="off",
        on_progress=lambda *bytes_read: seen.append(bytes_read),
    )
    assert len(seen) > 10 and seen == sorted(set(seen)) and seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_read_straight_to_its_device_is_the_one_transformers_loads(
    arch: str, dtype: str, target_of: Callable[[str], Path]
) -> None:
    directory = target_of(arch)
    config_json = json.loads((directory / "config.json").read_text())
    with Weights(directory, "cpu", getattr(torch, dtype)) as weights:
        config, theirs = load_through_transformers(directory, config_json, weights)
        with quiet_loading(hf_logging):
            model = load_directly(config, weights)
    assert isinstance(theirs, TransformersDecoder) and model is not None and not model.training
    expected = theirs._model.state_dict() | dict(theirs._model.named_buffers())
    found = model.state_dict() | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_names_that_transformers_must_convert_are_left_to_it(target_of: Callable[[str], Path]) -> None:
    directory = target_of("gpt2")
    with Weights(directory, "cpu", torch.float32) as weights:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory)
        assert load_directly(config, weights) is not None
        name, file = next(iter(weights._file_of.items()))
        weights._file_of["another.name"] = file
        assert load_directly(config, weights) is None
        del weights._file_of["another.name"], weights._file_of[name]
        assert load_directly(config, weights) is None


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:13"])
def test_a_device_is_named_as_torch_names_it(device: str) -> None:
    check_device_name(device)
    assert ServeConfig().prefill_chunk(device) == (256 if device.startswith("cuda") else 32)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "cpu:0"])
def test_another_device_is_refused_by_the_flags_name(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {device}: not a device; write cpu, cuda or cuda:N"):
        check_device_name(device)


def test_kv_memory_is_auto_or_a_size() -> None:
    assert parse_kv_memory("auto") is None and parse_kv_memory(ServeConfig().kv_memory) is None
    assert parse_kv_memory("2GiB") == 2 << 30
    with pytest.raises(ConfigError, match="--kv-memory much: not a size"):
        parse_kv_memory("much")


def test_a_block_of_the_pool_takes_small_pages(backend: PagedBackend) -> None:
    """Sequences are far apart: of large pages the first token of one would clear one in each layer."""
    memory = PoolMemory(backend.facts, 1 << 13, 16)
    assert all(pool.nbytes > 16 * LARGE_PAGE for pool in memory.tensors)
    before = resident_bytes()
    for pool in memory.tensors:
        pool.index_fill_(1, torch.tensor([5000]), 0.0)
    assert resident_bytes() - before < LARGE_PAGE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
