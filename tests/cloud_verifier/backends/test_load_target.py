"""Which directories load, which are refused, and with what words."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import add_token, draw_mask_factors, edit_config, make_tiny_target

from outrider.cloud_verifier.backends import loading
from outrider.cloud_verifier.backends.architectures import check_supported
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target, resolve_device
from outrider.cloud_verifier.config import ServeConfig
from outrider.common.config.units import parse_size
from outrider.common.errors import ConfigError, ModelError

GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.fixture
def llama(target_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(target_of("llama"), tmp_path / "model"))


def test_a_loaded_target_describes_itself(llama: Path) -> None:
    backend = load_target(llama)
    assert (backend.vocab_size, backend.max_context, backend.dtype, backend.device) == (
        512,
        512,
        "float32",
        "cpu",
    )
    assert 256 < backend.num_tokens <= 512
    assert backend.eos_token_ids == (0,)
    assert len(backend.fingerprint) == len(backend.tokenizer_fingerprint) == 64
    assert (backend.num_forwards, backend.num_query_rows) == (0, 0), "the load's own check is not counted"


def test_the_pool_is_sized_in_bytes_and_too_few_are_refused_with_how_many_it_takes(llama: Path) -> None:
    per_token = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, bytes
    assert load_target(llama, kv_bytes=1000 * per_token).num_kv_tokens == 992, "whole blocks of 16"
    assert load_target(llama, kv_bytes=256 * per_token).num_free_tokens == 256
    with pytest.raises(ModelError, match=rf"--kv-memory.* holds 240 tokens.*{per_token} bytes each.*384KiB"):
        load_target(llama, kv_bytes=256 * per_token - 1)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("64 kib", 1 << 16), ("65536", 1 << 16), ("100B", 100)],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-5", "12MB", "many", "1e9", "0.1B", "1.5.2GiB"])
def test_any_other_size_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory .*not a size.*512MiB"):
        parse_size(text, "--kv-memory")


def test_end_of_text_ids_come_from_the_generation_config_first(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load_target(llama).eos_token_ids == (3, 7)
    (llama / "generation_config.json").unlink()
    edit_config(llama, eos_token_id=5)
    assert load_target(llama).eos_token_ids == (5,)


@pytest.mark.parametrize("value", ["</s>", [0, None], True])
def test_what_is_no_end_of_text_id_is_refused(llama: Path, value: object) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"eos_token_id is .*want an id"):
        load_target(llama)


def test_end_of_text_ids_outside_of_the_vocabulary_are_left_out(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7, 50256]}))
    assert load_target(llama).eos_token_ids == (7,)
    assert "eos_token_id [-1, 50256] is no id of the model" in caplog.text


def test_a_model_may_lack_special_tokens_of_its_tokenizer_and_no_others(llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    add_token(llama / "tokenizer.json", 512)
    assert load_target(llama).num_tokens == 512
    add_token(other / "tokenizer.json", 512, is_special=False)
    with pytest.raises(ModelError, match=r"has 513 tokens, but the embedding only 512 rows"):
        load_target(other)


def test_another_weight_gives_another_fingerprint(llama: Path, tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", "llama", seed=1)
    assert load_target(llama).fingerprint != load_target(other).fingerprint
    assert load_target(llama).tokenizer_fingerprint == load_target(other).tokenizer_fingerprint


def test_loading_is_silent_and_opens_no_connection(
    llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loading tried to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_target(llama)
    assert capfd.readouterr() == ("", "")


def test_bfloat16_runs_on_a_cpu(llama: Path) -> None:
    backend, exact = load_target(llama, dtype="bfloat16"), load_target(llama)
    rows, reference = (b.forward([ForwardItem(b.new_sequence(), [4, 5, 6, 7], 4)]) for b in (backend, exact))
    assert backend.dtype == "bfloat16" and rows.dtype == reference.dtype
    assert abs(rows - reference).max() < 0.05 * abs(reference).max()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*.safetensors weights"),
    ],
)
def test_a_missing_file_is_named(llama: Path, name: str, message: str) -> None:
    (llama / name).unlink()
    with pytest.raises(ModelError, match=message):
        load_target(llama)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model directory at .*nowhere"):
        load_target(tmp_path / "nowhere")


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickled weights can run code"):
        load_target(llama)


def test_truncated_weights_are_a_model_error(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_target(llama)


def test_attention_sinks_are_refused_by_the_first_forward(tmp_path: Path) -> None:
    directory = make_tiny_target(
        tmp_path / "model", "gpt_oss", head_dim=32, num_local_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ModelError, match="cannot run over paged KV: attention argument 's_aux'"):
        load_target(directory)


ENCODER = {"num_key_value_heads": 4, "is_decoder": False}


@pytest.mark.parametrize(
    ("arch", "fields", "reason"),
    [
        ("bert", ENCODER, "attention argument 'is_causal'.*attend to later ones"),
        ("roberta", ENCODER, "attention argument 'is_causal'.*attend to later ones"),
        # Whose positions begin after that of padding, where nobody gives them.
        ("roberta", ENCODER | {"is_decoder": True}, "counts positions, in another way, as a logit is off by"),
    ],
)
def test_attention_that_is_not_over_all_tokens_before_is_refused(
    tmp_path: Path, arch: str, fields: dict[str, Any], reason: str
) -> None:
    directory = make_tiny_target(tmp_path / "model", arch, **fields)
    with pytest.raises(ModelError, match=f"cannot run over paged KV: .*{reason}"):
        load_target(directory)


def test_a_model_with_masks_of_its_own_is_refused(tmp_path: Path) -> None:
    """Before it is trained too, when they change nothing."""
    directory = make_tiny_target(tmp_path / "model", "doge")
    for draw in (lambda _: None, draw_mask_factors):
        draw(directory)
        with pytest.raises(ModelError, match=r"attention argument 'attention_mask'.*a mask of its own"):
            load_target(directory)


def test_bert_as_a_decoder_loads(tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path / "model", "bert", **ENCODER | {"is_decoder": True})
    assert load_target(directory, exact_rows="off").vocab_size == 512


def test_remote_code_is_refused(llama: Path) -> None:
    edit_config(llama, model_type="my_model", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    with pytest.raises(ModelError, match=r"'my_model' is unknown.*brings its own code, which is never run"):
        load_target(llama)


def test_a_broken_config_is_a_model_error(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        load_target(llama)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"num_hidden_layers": "many"}, "is not a usable configuration"),
        ({"rope_scaling": "linear"}, "is not a usable configuration"),
        ({"rope_scaling": {"type": "linear"}}, "rotary embedding linear has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "numbers must be positive"),
        ({"rope_scaling": LLAMA3}, "rotary embedding llama3 has no low_freq_factor"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor is not below high_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": "large"}},
            "could not convert string",
        ),
    ],
)
def test_an_unusable_config_is_a_model_error(llama: Path, fields: dict[str, Any], reason: str) -> None:
    edit_config(llama, **fields)
    with pytest.raises(ModelError, match=reason):
        load_target(llama)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": 0},
        {"sliding_window": "wide"},
        {"rope_parameters": 3},
    ],
)
def test_so_is_one_that_transformers_cannot_use(llama: Path, fields: dict[str, Any]) -> None:
    edit_config(llama, **fields)
    with pytest.raises(ModelError, match="is not a usable configuration"):
        load_target(llama, decoder="transformers")


def test_windows_that_are_not_all_given_are_those_of_transformers(tmp_path: Path) -> None:
    given = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    directory = make_tiny_target(tmp_path / "model", "qwen2", **given)
    path = directory / "config.json"
    kept = {
        k: v for k, v in json.loads(path.read_text()).items() if k not in ("max_window_layers", "layer_types")
    }
    path.write_text(json.dumps(kept))
    assert load_target(directory).facts.windows == (None, None, None), "from the 28th layer on"


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device_is_the_first_of_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert ServeConfig().device == "auto" and resolve_device("auto") == expected
    assert resolve_device("cpu") == "cpu"


def test_auto_loads_where_it_is_resolved_to(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = load_target(llama, device="auto")
    assert (backend.device, backend.dtype) == ("cpu", "float32")


def test_wrong_device_and_dtype_are_named(llama: Path) -> None:
    with pytest.raises(ModelError, match="device 'tpu' is not cpu, cuda or cuda:N"):
        load_target(llama, device="tpu")
    with pytest.raises(ModelError, match="dtype 'float64' is not one of auto, float32, bfloat16"):
        load_target(llama, dtype="float64")


@pytest.mark.parametrize(
    ("arch", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 64}, (64, 64, 64)),
        ("mistral", {"sliding_window": 512}, (None, None, None)),  # its context
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, (None, None, None)),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 64),
        ),
        ("gemma3_text", {"sliding_window": 32, "head_dim": 32, "layer_types": GEMMA_LAYERS}, (32, 32, None)),
    ],
)
def test_each_layer_has_the_window_of_its_configuration(
    tmp_path: Path, arch: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_target(make_tiny_target(tmp_path / "model", arch, **fields)).facts.windows == windows


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_a_window_may_be_larger_than_the_pool(tmp_path: Path, decoder: str) -> None:
    """As with Mistral 7B's of 4,096 tokens in float32: the 512 MiB that a CPU's pool has hold 2,048."""
    directory = make_tiny_target(tmp_path / "model", "mistral", sliding_window=400)
    backend = load_target(directory, decoder=decoder, kv_tokens=256)
    assert (backend.max_context, backend.facts.windows) == (256, (400,) * 3)
    sequence = backend.new_sequence()
    logits = backend.forward([ForwardItem(sequence, [1 + i % 200 for i in range(256)], 1)])
    assert logits.shape == (1, 512)
    backend.close(sequence)


def test_a_model_that_attends_over_another_window_than_its_configuration_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model's code reads the window from a field that we do not know."""
    directory = make_tiny_target(tmp_path / "model", "mistral", sliding_window=64)
    monkeypatch.setattr(loading, "layer_windows", lambda config, max_context: (None,) * 3)
    with pytest.raises(ModelError, match=r"windows of \[64, 64, 64\] tokens, its configuration says \[None"):
        load_target(directory, decoder="transformers")


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize("field", ["sliding_window", "window_size"])
def test_a_window_in_the_configuration_that_the_model_does_not_follow_is_refused(
    tmp_path: Path, field: str, decoder: str
) -> None:
    directory = make_tiny_target(tmp_path / "model", "llama", **{field: 64})
    with pytest.raises(
        ModelError, match=r"windows of \[None, None, None\] tokens, its configuration says \[64"
    ):
        load_target(directory, decoder=decoder)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("mamba", {}, "recurrent"),
        ("mamba2", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("gemma2", {"sliding_window": None}, "sliding_window is not given"),
        ("llama4_text", {}, "chunked"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "longest sequence",
        ),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ],
)
def test_other_attention_is_refused_by_name(model_type: str, fields: dict[str, Any], reason: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **fields)
    with pytest.raises(ModelError, match=f"model type '{model_type}' is not supported as a target.*{reason}"):
        check_supported(config, getattr(config, "max_position_embeddings", None) or 4096)


def test_a_model_of_images_too_is_refused_for_what_it_is(llama: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("gemma3").save_pretrained(llama)
    with pytest.raises(
        ModelError, match="model type 'gemma3' reads more than text: a target is a decoder of"
    ):
        load_target(llama)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen2",
        "qwen3",
        "gpt_neox",
        "gpt2",
        "granite",
        "olmo2",
        "phi",
        "mistral",
        "gemma2",
        "gemma3_text",
    ],
)
def test_other_decoders_pass(model_type: str) -> None:
    from transformers import AutoConfig

    check_supported(AutoConfig.for_model(model_type), 4096)
