"""Llama, Mistral, Qwen2, Qwen3 and Gemma 2 from config.json and safetensors: what transformers computes, without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.models import edit_config, make_tiny_target

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.layer_kernels import device_kernels, host_kernels
from outrider.cloud_verifier.backends.lean import LeanDecoder
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.products import packed
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder
from outrider.cloud_verifier.server.cli import describe_target
from outrider.common.errors import ModelError
from outrider.kernels import host_layers, plain_layers

TEXT = [(13 * i * i + 5 * i + 3) % 500 for i in range(24)]
ROPE = {"rope_theta": 5000.0, "original_max_position_embeddings": 16}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope": {"rope_parameters": LLAMA3},
    "llama-linear-rope": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    "llama-head-dim": {"head_dim": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "mistral-window": {"sliding_window": 7},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2-untied": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3": {},
    "qwen3-window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "gemma2": {
        "sliding_window": 9,
        "head_dim": 48,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
    },
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 32},
    "qwen3-untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 64},
}


def model_of(directory: Path, case: str) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    model = make_tiny_target(directory, case.partition("-")[0], **CASES[case])
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.ndim == 1:  # transformers starts biases as zeros and norms as ones
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, weights, metadata={"format": "pt"})
    return model


def logits_of(model: Path, decoder: str, **options: Any) -> Logits:
    """Returns the logits of a prompt, of four rows after it, and of one."""
    backend = load_target(model, decoder=decoder, kv_tokens=256, exact_rows="off", **options)
    kind = {"lean": LeanDecoder, "cuda": CudaDecoder, "transformers": TransformersDecoder}[decoder]
    assert type(backend.decoder) is kind
    sequence, rows = backend.new_sequence(), []
    for start, end in ((0, 19), (19, 23), (23, 24)):
        item = ForwardItem(sequence, TEXT[start:end], end - start)
        rows.append(backend.forward([item]).copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", case)
    expected = logits_of(model, "transformers")
    for decoder in ("lean", "cuda"):
        found = logits_of(model, decoder)
        np.testing.assert_allclose(found, expected, atol=1e-4 * abs(expected).max(), err_msg=decoder)


@pytest.mark.parametrize(("case", "num_of_a_layer"), [("llama", 10), ("qwen2-untied", 10), ("gemma2", 12)])
def test_a_layer_on_cuda_is_so_many_launches(case: str, num_of_a_layer: int, tmp_path: Path) -> None:
    """Products that are not split, our kernels, and two of attention."""
    backend = load_target(model_of(tmp_path / "model", case), decoder="cuda", kv_tokens=256, exact_rows="off")
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            counts[name] += 1
            return function(*given)

        return call

    decoder: Any = backend.decoder
    names = ("add_norm", "rotate", "gate")
    decoder._kernels = SimpleNamespace(
        **{each: counted("kernels", getattr(plain_layers, each)) for each in names}
    )
    decoder.use_linear(counted("products", torch.nn.functional.linear))
    backend.forward([ForwardItem(backend.new_sequence(), TEXT[:5], 1)])
    num_layers = backend.facts.num_layers
    attention = 2 * len(backend.rules_seen)
    assert counts.total() + attention == num_of_a_layer * num_layers + 2, "the last norm and the head, too"


@pytest.mark.parametrize("is_another", [True, False])
def test_a_head_in_the_files_counts_also_where_the_configuration_ties_it(
    is_another: bool, tmp_path: Path
) -> None:
    """Fine-tuned models are saved so: transformers ties the two only where they are alike."""
    from safetensors.torch import load_file, save_file

    model = make_tiny_target(tmp_path / "model", "qwen2")
    tied = logits_of(model, "lean")
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head.flip(0) if is_another else head
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(model, "transformers")
    assert np.allclose(expected, tied, atol=1e-4 * abs(tied).max()) is not is_another
    for decoder in ("lean", "cuda"):
        found = logits_of(model, decoder)
        np.testing.assert_allclose(found, expected, atol=1e-4 * abs(expected).max(), err_msg=decoder)


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_bfloat16_logits_are_as_near_to_exact_ones_as_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    model = model_of(tmp_path / "model", case)
    exact = logits_of(model, "transformers")
    lean, cuda, theirs = (
        np.square(logits_of(model, decoder, dtype="bfloat16") - exact).mean()
        for decoder in ("lean", "cuda", "transformers")
    )
    assert max(lean, cuda) < 1.5 * theirs


@pytest.mark.parametrize("case", ["llama", "gemma2"])
@pytest.mark.parametrize("decoder", ["lean", "cuda"])
def test_embeddings_are_those_that_layers_are_given(case: str, decoder: str, tmp_path: Path) -> None:
    """Gemma's are scaled; what drafts from them is trained with those of transformers."""
    model = model_of(tmp_path / "model", case)
    ids = torch.tensor(TEXT)
    found, expected = (
        load_target(model, decoder=each, kv_tokens=256, exact_rows="off").decoder.embed(ids)
        for each in (decoder, "transformers")
    )
    torch.testing.assert_close(found, expected)


def test_configurations_of_earlier_transformers_are_read_too(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "llama-llama3-rope")
    expected = logits_of(model, "lean")
    raw = json.loads((model / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope
    (model / "config.json").write_text(json.dumps(raw))
    assert (logits_of(model, "lean") == expected).all()


def shard(model: Path) -> None:
    """Splits the weights into two files and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file)
        weight_map |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights_are_read_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "llama")
    expected = logits_of(model, "lean")
    shard(model)
    assert (logits_of(model, "lean") == expected).all()
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors cannot be loaded"):
        load_target(model)


@pytest.fixture
def llama(target_of: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_of("llama"), tmp_path / "model"))


def change_tensor(model: Path, name: str, change: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensor = change(tensors.pop(name))
    save_file(tensors if tensor is None else tensors | {name: tensor}, model / "model.safetensors")


def test_a_missing_tensor_is_named(llama: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensor(llama, name, lambda tensor: None)
    with pytest.raises(ModelError, match=f"cannot be loaded: it has no tensor '{name}'"):
        load_target(llama)


def test_a_tensor_of_another_shape_is_named_with_both(llama: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensor(llama, name, lambda tensor: tensor[:32].clone())
    with pytest.raises(ModelError, match=rf"'{name}' is \[32, 128\], config.json says \[64, 128\]"):
        load_target(llama)


def test_a_tensor_of_integers_is_refused(llama: Path) -> None:
    change_tensor(llama, "model.norm.weight", lambda tensor: tensor.int())
    with pytest.raises(ModelError, match=r"'model.norm.weight' is torch.int32"):
        load_target(llama)


def test_sizes_that_contradict_one_another_are_a_model_error(llama: Path) -> None:
    for fields in ({"num_key_value_heads": 3}, {"hidden_size": "many"}, {"head_dim": 7}):
        edit_config(llama, **({"num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32} | fields))
        with pytest.raises(ModelError, match=r"config.json is not a usable configuration"):
            load_target(llama)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 2.0}},
    ],
)
def test_what_the_own_decoder_does_not_compute_is_left_to_transformers(
    llama: Path, fields: dict[str, Any]
) -> None:
    edit_config(llama, **fields)
    backend = load_target(llama, kv_tokens=256)
    assert not isinstance(backend.decoder, LeanDecoder)
    assert " (through transformers, float32" in describe_target(backend)


def test_chunked_attention_in_config_json_is_refused_without_transformers(llama: Path) -> None:
    edit_config(llama, attention_chunk_size=64)
    loading = (
        "import sys; sys.modules['transformers'] = None\n"
        "from outrider.cloud_verifier.backends.loading import load_target\n"
        f"load_target({str(llama)!r})"
    )
    done = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=False)
    assert "'llama' is not supported as a target: it uses chunked attention" in done.stderr


def test_a_target_loads_where_transformers_cannot_be_imported(llama: Path) -> None:
    loading = (
        "import sys; sys.modules['transformers'] = None\n"
        "from outrider.cloud_verifier.backends.loading import load_target\n"
        f"print(load_target({str(llama)!r}, kv_tokens=256, exact_rows='off').num_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 256, done.stderr


def test_kernels_that_do_not_run_are_torchs_own_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    no_device = "cuda:99"  # as on a machine whose compiler Triton does not find, launching fails
    assert device_kernels(no_device) is plain_layers
    assert "do not run here" in caplog.text


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_a_machine_without_numba_computes_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path / "model", case)
    assert host_kernels(torch.float32) is host_layers and host_kernels(torch.bfloat16) is plain_layers
    expected = logits_of(model, "lean")
    monkeypatch.setitem(sys.modules, "outrider.kernels.host_layers", None)
    monkeypatch.delattr("outrider.kernels.host_layers")
    assert host_kernels(torch.float32) is plain_layers
    found = logits_of(model, "lean")
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_few_rows_have_the_same_bits_in_one_call_of_compiled_code(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts side by side, one alone, and a tree; features of some layers; with a helper."""
    monkeypatch.setattr(packed, "_share", lambda *_: 0.5)  # our kernel is fast
    monkeypatch.setattr("outrider.cloud_verifier.backends.attention.host.MIN_SHARED_SCORES", 8)
    model, before = model_of(tmp_path / "model", case), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        backend = load_target(model, kv_tokens=256)
    finally:
        torch.set_num_threads(before)
    decoder: Any = backend.decoder
    if decoder.most_own_rows == 0:
        pytest.skip("the library's products of this machine are summed in another order")
    backend.feature_layers = (0, 1, backend.facts.num_layers - 1, backend.facts.num_layers)
    compiled, num_calls = decoder._compiled, 0

    def counted(*given: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return compiled(*given)  # type: ignore[no-any-return]

    counted.can_run = compiled.can_run  # type: ignore[attr-defined]
    found = []
    for decoder._compiled in (counted, None):
        backend.clear_kv()
        first, second = backend.new_sequence(), backend.new_sequence()
        steps = [[ForwardItem(first, TEXT[:9], 9), ForwardItem(second, TEXT[5:8], 1)]]
        steps += [[ForwardItem(first, TEXT[9:10], 1)], [ForwardItem(second, TEXT[:5], 5, (-1, 0, 0, 1, 2))]]
        for items in steps:
            found += [torch.from_numpy(backend.forward(items).copy()), *backend.features.values()]
            assert [*backend.rules_seen] == [*range(backend.facts.num_layers)]
        backend.close(first)
        backend.close(second)
        found += [each.clone() for each in backend.memory.tensors]
    half = len(found) // 2
    assert num_calls == len(steps) and half == 3 * 5 + 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one, other)
