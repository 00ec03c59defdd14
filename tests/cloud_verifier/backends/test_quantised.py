"""Targets with NF4 weights, and directories that others quantised: served as the same target, or refused by name."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import edit_config, make_tiny_target

from benchmarks.engine_texts import write_texts
from outrider.cloud_verifier.backends import memory
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.products.ways import Linear, ProductWay
from outrider.cloud_verifier.backends.quantised import four_bit
from outrider.cloud_verifier.backends.quantised.choice import (
    Quantisation,
    find_quantisation,
    parse_quantize,
)
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder
from outrider.common.errors import ConfigError, ModelError
from outrider.common.process.extras import MissingExtraError, how_to_install
from outrider.common.types import SamplingParams

HAS_BITSANDBYTES = four_bit.is_installed()
needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs the extra quant")


def bitsandbytes_module() -> Any:
    """Not imported above: it takes 4 s, also where tests are only collected."""
    return four_bit.import_bitsandbytes("these tests")


TEXT = [(37 * i + 11) % 300 for i in range(70)]


def load(directory: Path, **options: Any) -> PagedBackend:
    return load_target(directory, **{"kv_tokens": 1024, "exact_rows": "off"} | options)


def score(backend: PagedBackend, fed: list[int]) -> Logits:
    sequence = backend.new_sequence()
    rows = backend.forward([ForwardItem(sequence, fed, len(fed))]).copy()
    backend.close(sequence)
    return rows


def matrices(backend: PagedBackend) -> list[Any]:
    assert isinstance(backend.decoder, TransformersDecoder)
    return [each for each in backend.decoder.model.modules() if four_bit.quant_state(each) is not None]


@pytest.fixture(scope="module")
def nf4(target_of: Callable[[str], Path]) -> PagedBackend:
    return load(target_of("llama"), quantize="nf4", exact_rows="on")


# ------------------------------------------------------------------------------------ made at loading


@needs_bitsandbytes
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_matrices_of_layers_are_nf4_and_the_rest_bfloat16(
    arch: str, target_of: Callable[[str], Path]
) -> None:
    backend = load(target_of(arch), quantize="nf4")
    plain = load(target_of(arch), decoder="transformers")
    found = matrices(backend)
    assert len(found) == 3 * (4 if arch == "gpt2" else 7)
    assert backend.dtype == "bfloat16" and backend.facts.quantisation == "nf4"
    decoder = backend.decoder
    assert isinstance(decoder, TransformersDecoder)
    biases = {id(each.bias): each.compute_dtype for each in found if each.bias is not None}
    rest = [p for p in decoder.model.parameters() if p.dtype != torch.uint8]
    assert all(p.dtype in (torch.bfloat16, biases.get(id(p))) for p in rest)
    in_layers = sum(four_bit.num_bytes(each) for each in found)
    assert in_layers / sum(4 * each.in_features * each.out_features for each in found) < 0.16
    for module, other in zip(found, plain.decoder._matrices(), strict=False):  # type: ignore[attr-defined]
        whole = module(torch.eye(module.in_features)) - module(
            torch.zeros(1, module.in_features)
        )  # [in, out]
        given = other.weight if arch == "gpt2" else other.weight.T
        assert torch.corrcoef(torch.stack((whole.flatten(), given.flatten())))[0, 1] > 0.99
        given.copy_(whole)
    rows, wanted = score(backend, TEXT), score(plain, TEXT)
    assert np.corrcoef(rows.ravel(), wanted.ravel())[0, 1] > 0.999, "the model of these matrices"


@needs_bitsandbytes
def test_another_quantisation_is_another_target_and_keeps_the_files_fingerprint(
    nf4: PagedBackend, target_of: Callable[[str], Path]
) -> None:
    plain = load(target_of("llama"))
    assert nf4.fingerprint != plain.fingerprint
    assert nf4.facts.files_fingerprint == plain.facts.files_fingerprint
    assert nf4.tokenizer_fingerprint == plain.tokenizer_fingerprint


@needs_bitsandbytes
def test_progress_is_told_while_weights_are_quantised(target_of: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    load(target_of("llama"), quantize="nf4", on_progress=lambda *read: seen.append(read))
    assert len(seen) > 10 and seen == sorted(set(seen)) and seen[-1][0] == seen[-1][1]


@needs_bitsandbytes
def test_sizes_that_the_cpus_kernel_cannot_take_are_left_to_the_library(tmp_path: Path) -> None:
    """48 inputs are no block of 64, 72 outputs no 32."""
    directory = make_tiny_target(
        tmp_path, hidden=48, num_attention_heads=4, head_dim=12, intermediate_size=72
    )
    backend = load(directory, quantize="nf4", exact_rows="on")
    assert not any(each.support_avx512bf16_for_cpu for each in matrices(backend))
    first = matrices(backend)[0]
    whole = bitsandbytes_module().functional.dequantize_4bit(first.weight.data, first.weight.quant_state)
    x = torch.randn(3, first.in_features).bfloat16()
    assert torch.allclose(first(x).float(), x.float() @ whole.float().T, atol=2e-2)
    assert backend.is_reproducible


def test_a_missing_package_is_an_error_that_names_the_extra(
    target_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    wanted = re.escape(f"--quantize nf4 needs bitsandbytes: {how_to_install('quant')}")
    with pytest.raises(MissingExtraError, match=wanted):
        load(target_of("llama"), quantize="nf4")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((target_of("llama") / name).read_bytes())
    edit_config(tmp_path, quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    with pytest.raises(MissingExtraError, match=r"reading the nf4 weights of .* needs bitsandbytes"):
        load(tmp_path)


@needs_bitsandbytes
def test_weights_that_do_not_fit_a_device_are_refused_by_their_size_in_nf4(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of which only the size is asked: nothing is loaded there."""
    backend = load(target_of("llama"), quantize="nf4")
    model = backend.decoder.model  # type: ignore[attr-defined]
    plain = load(target_of("llama"), decoder="transformers").decoder.model  # type: ignore[attr-defined]
    expected = four_bit.num_four_bit_bytes(plain, torch.bfloat16)
    assert expected == pytest.approx(four_bit.num_bytes(model), rel=0.05)
    monkeypatch.setattr("outrider.cloud_verifier.backends.loading.resolve_device", lambda device: device)
    monkeypatch.setattr(memory, "device_memory", lambda _: (expected - 1, 1 << 30))
    with pytest.raises(ModelError, match=r"take \d+KiB in nf4; cuda has \d+KiB free of 1GiB"):
        load(target_of("llama"), quantize="nf4", device="cuda")


# ------------------------------------------------------------------------------------------ rows and texts


@needs_bitsandbytes
def test_texts_in_batches_and_by_speculation_are_cloud_onlys(nf4: PagedBackend) -> None:
    assert nf4.is_reproducible
    prompts = [TEXT[i : i + 12] for i in range(0, 48, 12)]
    samplings = [SamplingParams(temperature=0.8, seed=seed) for seed in range(4)]
    expected = write_texts(nf4, prompts, samplings, 12)
    for num_together in (1, 4):
        texts = write_texts(nf4, prompts, samplings, 12, expected=expected, num_together=num_together)
        assert texts == expected


@needs_bitsandbytes
def test_nf4_goes_with_fp8_kv_and_another_dtype(target_of: Callable[[str], Path]) -> None:
    options = {"quantize": "nf4", "kv_dtype": "fp8", "dtype": "float32", "exact_rows": "on"}
    backend = load(target_of("qwen3"), **options)
    assert (backend.dtype, backend.kv_dtype, backend.quantisation) == ("float32", "fp8", "nf4")
    prompts, samplings = [TEXT[:12], TEXT[5:30]], [SamplingParams(temperature=0.0)] * 2
    expected = write_texts(backend, prompts, samplings, 12)
    assert write_texts(backend, prompts, samplings, 12, expected=expected, num_together=2) == expected


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_count_of_rows_that_sums_in_another_order_is_left_out(
    dtype: str, target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 bits keep no numbers that cancel: the check multiplies signs by inputs that do."""
    backend = load(target_of("llama"), quantize="nf4", dtype=dtype)
    bitsandbytes = bitsandbytes_module()
    plain = bitsandbytes.matmul_4bit

    def product(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if x.shape[-2] != 12:
            return plain(x, *args, **options)
        low = x.clone()
        low[..., x.shape[-1] // 2 :] = 0
        return plain(low, *args, **options) + plain(x - low, *args, **options)

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", product)
    use_exact_rows(backend, "on")
    assert backend.row_plan is not None and 12 not in backend.row_plan.counts
    assert {8, 16} <= set(backend.row_plan.counts)


@needs_bitsandbytes
def test_where_the_kernels_rows_differ_whole_matrices_are_multiplied(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where bitsandbytes chooses its kernel by the number of rows."""

    class Own(ProductWay):
        name = "another product"

        def enter(self, dtype: torch.dtype) -> Linear:
            return lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    backend = load(target_of("qwen2"), quantize="nf4")
    before = score(backend, TEXT)
    bitsandbytes = bitsandbytes_module()
    plain = bitsandbytes.matmul_4bit

    def by_rows(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = plain(x, *args, **options)
        out[..., -1, :] *= 1.01
        return out

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", by_rows)
    use_exact_rows(backend, "on", ways=(ProductWay(), Own()))
    assert backend.is_reproducible and backend.product_way == "another product"
    assert np.abs(score(backend, TEXT) - before).max() < 0.1 * np.abs(before).max()


@needs_bitsandbytes
def test_matrices_packed_for_the_cpu_are_multiplied_by_bitsandbytes_alone(nf4: PagedBackend) -> None:
    if not matrices(nf4)[0].support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512_BF16")
    with pytest.raises(ModelError, match="products of 4-bit matrices on a CPU are bitsandbytes' own"):
        four_bit.multiply_by(torch.nn.functional.linear, matrices(nf4)[0], torch.zeros(1, 128))


# --------------------------------------------------------------------------------- quantised by others


@pytest.fixture(scope="module")
def saved(target_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers saved with NF4 weights, float16 arithmetic in its configuration."""
    if not HAS_BITSANDBYTES:
        pytest.skip("needs the extra quant")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    directory = tmp_path_factory.mktemp("nf4")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        target_of("llama"), quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((target_of("llama") / "tokenizer.json").read_bytes())
    return directory


@pytest.mark.parametrize("asked", ["", "nf4"])
def test_a_directory_saved_in_nf4_is_what_is_made_at_loading(
    saved: Path, nf4: PagedBackend, asked: str
) -> None:
    backend = load(saved, quantize=asked)
    assert backend.facts.quantisation == "nf4" and backend.fingerprint != nf4.fingerprint
    assert len(matrices(backend)) == len(matrices(nf4))
    plain = load(Path(nf4_directory(nf4, saved)), quantize="nf4")
    assert np.array_equal(score(backend, TEXT), score(plain, TEXT))


def nf4_directory(nf4: PagedBackend, saved: Path) -> str:
    """The directory that `nf4` was made of."""
    decoder = nf4.decoder
    assert isinstance(decoder, TransformersDecoder)
    return str(decoder.model.config._name_or_path)


def test_fp8_is_read_into_the_targets_dtype(target_of: Callable[[str], Path], tmp_path: Path) -> None:
    if not HAS_BITSANDBYTES:
        pytest.skip("needs the extra quant")
    directory = make_tiny_target(tmp_path, dtype="bfloat16", num_key_value_heads=4)
    kept, written = load_file(directory / "model.safetensors"), {}
    for name, weight in kept.items():
        written[name] = weight
        if "_proj" in name:
            blocks = [size // 128 for size in weight.shape]
            scales = 2.0 ** -torch.arange(4.0, 4.0 + blocks[0] * blocks[1]).reshape(blocks)
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rounded = (weight.float() / wide).to(torch.float8_e4m3fn)
            written |= {name: rounded, f"{name}_scale_inv": scales}
            kept[name] = (rounded.float() * wide).to(torch.bfloat16)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    dtypes = {"auto": "bfloat16", "float32": "float32"}
    expected = [score(load(directory, dtype=each, decoder="transformers"), TEXT) for each in dtypes.values()]
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(directory, quantization_config=fields)
    for (asked, dtype), rows in zip(dtypes.items(), expected, strict=True):
        backend = load(directory, dtype=asked)
        assert backend.dtype == dtype and backend.facts.quantisation == "fp8" and not matrices(backend)
        assert np.array_equal(score(backend, TEXT), rows)


REFUSED = [
    ({"quant_method": "gptq", "bits": 4}, "by gptq .*: transformers reads them by optimum and gptqmodel"),
    ({"quant_method": "awq", "bits": 4}, "by awq .*: transformers reads them by gptqmodel, which no extra"),
    ({"quant_method": "compressed-tensors"}, "by compressed-tensors .* its kernels were never checked here"),
    ({"quant_method": "fbgemm_fp8"}, "by fbgemm_fp8 .* fbgemm-gpu"),
    ({"quant_method": "hqq"}, "by hqq .*: its kernels were never checked here"),
    ({"quant_method": "mxfp4"}, "by mxfp4 "),
    ({"quant_method": "something new"}, "by something new "),
    ({"bits": 3}, "by an unnamed method "),
    ({"load_in_8bit": True}, "LLM.int8 .* one tenant's text changes another's"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8 .* one tenant's text"),
    ({"quant_method": "bitsandbytes"}, "by bitsandbytes .* its 4 bits must be nf4 or fp4"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "must be nf4 or fp4, and are 'int4'"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
@pytest.mark.parametrize("asked", ["", "nf4"])
def test_what_others_quantised_is_refused_by_name_before_anything_is_read(
    fields: dict[str, Any], reason: str, asked: str, target_of: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((target_of("llama") / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    edit_config(tmp_path, quantization_config=fields)
    with pytest.raises(ModelError, match=rf"weights of .* are quantised .*{reason}.*--quantize nf4"):
        load(tmp_path, quantize=asked)


def test_how_weights_are_quantised_comes_from_the_flag_or_the_directory() -> None:
    assert find_quantisation({}, "", "m") is None
    assert find_quantisation({"quantization_config": None}, "nf4", "m") == Quantisation("nf4", False)
    files = {"quantization_config": {"load_in_4bit": True}}
    assert find_quantisation(files, "", "m") == Quantisation("fp4", True), "bitsandbytes' default"
    with pytest.raises(ModelError, match="--quantize nf4: the weights of m are fp4 already; leave it out"):
        find_quantisation(files, "nf4", "m")
    with pytest.raises(ModelError, match=r"quantization_config in config\.json is not an object"):
        find_quantisation({"quantization_config": "nf4"}, "", "m")


def test_the_flag_takes_nf4_and_says_why_not_int8() -> None:
    assert (parse_quantize("nf4"), parse_quantize("NF4"), parse_quantize("none")) == ("nf4", "nf4", "")
    for name in ("int8", "llm.int8", "LLM.int8()", "8bit"):
        with pytest.raises(ConfigError, match="one tenant's text changes another's; use nf4"):
            parse_quantize(name)
    with pytest.raises(ConfigError, match=r"--quantize nf: .*did you mean nf4\?"):
        parse_quantize("nf")


def test_a_tensor_that_transformers_would_draw_at_random_is_an_error(
    target_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((target_of("gpt2") / name).read_bytes())
    tensors = load_file(target_of("gpt2") / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ModelError, match=r"no tensor 'transformer\.h\.1\.mlp"),
    ):
        load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
