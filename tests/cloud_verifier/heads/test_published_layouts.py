"""Heads in the layouts that people publish: each is read, drafts and leaves the text alone; each damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle import make_eagle
from support.heads import HIDDEN
from support.matrices import one_of
from support.models import make_tiny_target
from test_heads_loading import change_config, change_tensors
from test_heads_text import NUM_NEW, cloud_only, make_prompt

from benchmarks.heads.service import Case, Service
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.eagle_layouts import usual_layers
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.modules import DraftVocabulary, MedusaHead
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams

VOCAB, NUM_HEADS = 512, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_layers=6)


@pytest.fixture(scope="module")
def backend(target: Path) -> PagedBackend:
    return load_target(target, kv_bytes=32 << 20)


def make_vllm_medusa(directory: Path, num_scored: int = VOCAB, **fields: Any) -> Path:
    """Writes random heads of Medusa as vLLM reads them; with fewer ids than the target's, a map of them."""
    chance = torch.Generator().manual_seed(1)
    tensors = {
        f"blocks.{k}.layers.{block}.weight": torch.randn(HIDDEN, HIDDEN, generator=chance) * 0.1
        for k in range(NUM_HEADS)
        for block in range(2)
    }
    for k in range(NUM_HEADS):
        tensors[f"lm_heads.{k}.weight"] = torch.randn(num_scored, HIDDEN, generator=chance)
    if num_scored < VOCAB:
        tensors["token_map"] = torch.randperm(VOCAB, generator=chance)[:num_scored]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": NUM_HEADS,
        "num_hidden_layers": 2,
        "truncated_vocab_size": num_scored,
        **fields,
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_embeddings(directory: Path, scale: float) -> Path:
    """Writes the target's input embeddings, scaled, to a draft's directory."""
    table = load_file(directory.parent / "target.safetensors")["table"]
    change_tensors(directory, lambda tensors: tensors.update({"embed_tokens.weight": scale * table}))
    return directory


Make = Callable[[Path], Path]
PUBLISHED: dict[str, Make] = {
    "EAGLE": lambda d: make_eagle(d, "eagle"),
    "EAGLE without a bias": lambda d: without(make_eagle(d, "eagle", bias=False), "fc.bias"),
    "EAGLE for Qwen2": lambda d: with_biases(make_eagle(d, "eagle", model_type="qwen2")),
    "EAGLE with the target's embeddings": lambda d: make_embeddings(make_eagle(d, "eagle"), 1.0),
    "SpecForge": lambda d: make_eagle(d, "specforge"),
    "SpecForge, layers named": lambda d: make_eagle(
        d,
        "specforge",
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
    ),
    "SpecForge, whole vocabulary": lambda d: without(
        make_eagle(d, "specforge", draft_vocab=VOCAB, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "t2d",
    ),
    "SpecForge, own embeddings": lambda d: make_embeddings(make_eagle(d, "specforge"), 1.1),
    "speculators": lambda d: make_eagle(d, "speculators"),
    "speculators, wide": lambda d: make_eagle(
        d, "speculators", size=160, eagle_aux_hidden_state_layer_ids=[2, 3, 4], norm_before_residual=True
    ),
    "EAGLE-3.1": lambda d: make_eagle(d, "specforge", norm_output=True, fc_norm=False),
    "Medusa for vLLM": make_vllm_medusa,
    "Medusa for vLLM, some ids": lambda d: make_vllm_medusa(d, 200),
    "Medusa for vLLM, one output": lambda d: without(
        make_vllm_medusa(d, original_lm_head=True), "lm_heads.1.weight", "lm_heads.2.weight"
    ),
    "Medusa for vLLM, outputs of no use": lambda d: make_vllm_medusa(d, original_lm_head=True),
    "Medusa for vLLM, a map of no use": lambda d: with_map(make_vllm_medusa(d)),
    "Medusa for vLLM, some of all rows": lambda d: with_map(make_vllm_medusa(d), 200),
    "Medusa for vLLM, its names prefixed": lambda d: prefixed(make_vllm_medusa(d)),
}


def with_map(directory: Path, num_scored: int = VOCAB) -> Path:
    """Names some ids as scored, and leaves the rows of all."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:num_scored]
    change_tensors(directory, lambda tensors: tensors.update({"token_map": ids}))
    change_config(directory, truncated_vocab_size=num_scored)
    return directory


def prefixed(directory: Path) -> Path:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {f"medusa_heads.{name}": each for name, each in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def without(directory: Path, *names: str) -> Path:
    change_tensors(directory, lambda tensors: [tensors.pop(name) for name in names])
    return directory


def with_biases(directory: Path) -> Path:
    sizes = {"q": 128, "k": 64, "v": 64}
    biases = {f"layers.0.self_attn.{name}_proj.bias": torch.ones(size) for name, size in sizes.items()}
    change_tensors(directory, lambda tensors: tensors.update(biases))
    return directory


def keep_table(backend: PagedBackend, path: Path) -> None:
    save_file({"table": backend.decoder.embed(torch.arange(VOCAB)).clone()}, path / "target.safetensors")


@pytest.mark.parametrize(("layout", "drafting"), one_of(2, PUBLISHED, [(0.0, 4), (0.8, 8)]), ids=str)
def test_a_published_directory_drafts_and_leaves_the_text_alone(
    layout: str,
    drafting: tuple[float, int],
    backend: PagedBackend,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    temperature, num_nodes = drafting
    keep_table(backend, tmp_path)
    with load_head(PUBLISHED[layout](tmp_path / "heads"), backend) as head:
        service = Service(backend, [head])
        sampling = SamplingParams(temperature=temperature, seed=1)
        case = Case(make_prompt(1, 12), sampling, head.name, num_nodes, num_nodes > 4)
        (text,) = service.write([case], NUM_NEW)
        assert text.token_ids == cloud_only(service, case)
    assert "the draft failed" not in caplog.text


def test_what_is_read_is_what_was_published(backend: PagedBackend, tmp_path: Path) -> None:
    keep_table(backend, tmp_path)

    def load(name: str) -> Any:
        return load_head(PUBLISHED[name](tmp_path / name), backend)

    assert load("SpecForge").facts.feature_layers == (1, 2, 2) == usual_layers(6)
    assert load("SpecForge, layers named").facts.feature_layers == (0, 2, 4)  # after these
    assert load("speculators, wide").facts.feature_layers == (1, 2, 3)  # before those named
    assert load("EAGLE with the target's embeddings").weights.embedding is None
    assert load("SpecForge, own embeddings").weights.embedding is not None
    output = load("SpecForge").weights.output
    assert isinstance(output, DraftVocabulary) and len(output.token_ids) == 300
    some = list(load("Medusa for vLLM, some ids").weights.children())[1]
    assert isinstance(some, MedusaHead) and isinstance(some.output, DraftVocabulary)
    assert usual_layers(32) == (1, 15, 28)


D2T = "d2t does not give each row another id below 512"
DAMAGED: dict[str, tuple[Make, Callable[[Path], object], str]] = {
    "no layer": (
        PUBLISHED["EAGLE"],
        lambda d: without(d, "layers.0.mlp.up_proj.weight"),
        "layers.0.mlp.up_proj.weight is missing",
    ),
    "two layers": (
        PUBLISHED["EAGLE"],
        lambda d: change_config(d, num_hidden_layers=2),
        "num_hidden_layers is 2; want 1",
    ),
    "another target's size": (
        PUBLISHED["EAGLE"],
        lambda d: change_config(d, hidden_size=64),
        "hidden_size is 64; the target's is 128",
    ),
    "another vocabulary": (
        PUBLISHED["EAGLE"],
        lambda d: change_config(d, vocab_size=32000),
        "vocab_size is 32000; want 512",
    ),
    "a tensor more": (
        PUBLISHED["EAGLE"],
        lambda d: change_tensors(d, lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)})),
        "the tensor layers.1.mlp.up_proj.weight is not of this kind of head",
    ),
    "no size": (
        PUBLISHED["EAGLE"],
        lambda d: change_config(d, intermediate_size=None),
        "config.json lacks a size of the layer",
    ),
    "heads that do not divide": (
        PUBLISHED["EAGLE"],
        lambda d: change_config(d, num_key_value_heads=3),
        "num_attention_heads is no multiple",
    ),
    "an unknown layer": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, model_type="gpt_oss"),
        "model_type is 'gpt_oss'; want one of llama, mistral, qwen2, qwen3",
    ),
    "Gemma's layer": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, model_type="gemma2", layer_types=["full_attention"]),
        "model_type is 'gemma2'; want one of llama, mistral, qwen2, qwen3",
    ),
    "another activation": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, hidden_act="gelu_pytorch_tanh"),
        "hidden_act is gelu_tanh; want silu",
    ),
    "norms of single features": (
        PUBLISHED["speculators"],
        lambda d: change_config(d, fc_norm=True, norm_output=True),
        "fc_norm is true; features that are each normalised are not served",
    ),
    "a window": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(
            d, model_type="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0
        ),
        "the attention's window is 8; want None",
    ),
    "pickled": (
        PUBLISHED["SpecForge"],
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "pytorch_model.bin is pickled, which is never loaded",
    ),
    "a fusion of two layers": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t.update({"fc.weight": torch.zeros(128, 256)})),
        r"fc.weight is \[128, 256\]; the target and config.json want \[128, 384\]",
    ),
    "no map": (PUBLISHED["SpecForge"], lambda d: without(d, "d2t"), "the tensor d2t is missing"),
    "a map out of the vocabulary": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t["d2t"].add_(300)),
        D2T,
    ),
    "a map that meets itself": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t["d2t"].copy_(-torch.arange(300))),
        D2T,
    ),
    "maps that differ": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t["t2d"].logical_not_()),
        "t2d and d2t do not name the same ids",
    ),
    "a map of fractions": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t.update({"d2t": torch.zeros(300)})),
        "d2t is torch.float32; want integers",
    ),
    "a layer of integers": (
        PUBLISHED["SpecForge"],
        lambda d: change_tensors(d, lambda t: t.update({"norm.weight": torch.ones(128, dtype=torch.int64)})),
        "norm.weight is torch.int64; want floating point",
    ),
    "too large a draft vocabulary": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, draft_vocab_size=600),
        "draft_vocab_size is 600; want a number from 1 to 512",
    ),
    "another target's states": (
        PUBLISHED["speculators, wide"],
        lambda d: change_config(d, target_hidden_size=256),
        "target_hidden_size is 256; the target's is 128",
    ),
    "no embeddings": (
        PUBLISHED["speculators, wide"],
        lambda d: without(d, "embed_tokens.weight"),
        "embed_tokens.weight is missing, and the target's has 128 columns, not 160",
    ),
    "layers the target has not": (
        PUBLISHED["speculators, wide"],
        lambda d: change_config(d, eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        r"eagle_aux_hidden_state_layer_ids \[2, 16, 29\] are not of the target; want some of 1, 2, 3, 4, 5",
    ),
    "layers that are no numbers": (
        PUBLISHED["speculators, wide"],
        lambda d: change_config(d, eagle_aux_hidden_state_layer_ids="all"),
        "eagle_aux_hidden_state_layer_ids is 'all'; want a list",
    ),
    "the last layer alone": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false",
    ),
    "a rotary embedding that is none": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, rope_scaling="linear"),
        "config.json is not a usable configuration",
    ),
    "options that are none": (
        PUBLISHED["SpecForge"],
        lambda d: change_config(d, eagle_config="usual"),
        "config.json is not a usable configuration",
    ),
    "another speculator": (
        PUBLISHED["speculators"],
        lambda d: change_config(d, speculators_model_type="dflash"),
        "speculators_model_type is 'dflash'; eagle3 is served",
    ),
    "no residual rule": (
        PUBLISHED["speculators"],
        lambda d: change_config(d, norm_before_residual=None),
        "norm_before_residual is not given",
    ),
    "no layer's configuration": (
        PUBLISHED["speculators"],
        lambda d: change_config(d, transformer_layer_config=None),
        "config.json has no transformer_layer_config",
    ),
    "no output": (
        PUBLISHED["Medusa for vLLM"],
        lambda d: without(d, "lm_heads.2.weight"),
        "lm_heads.2.weight is missing",
    ),
    "no block": (
        PUBLISHED["Medusa for vLLM"],
        lambda d: without(d, "blocks.1.layers.1.weight"),
        "blocks.1.layers.1.weight is missing",
    ),
    "no map of ids": (
        PUBLISHED["Medusa for vLLM, some ids"],
        lambda d: without(d, "token_map"),
        "token_map is missing",
    ),
    "too many ids": (
        PUBLISHED["Medusa for vLLM"],
        lambda d: change_config(d, truncated_vocab_size=600),
        "truncated_vocab_size is 600; want a number up to 512",
    ),
    "a scale": (
        PUBLISHED["Medusa for vLLM"],
        lambda d: change_config(d, logit_scale=0.5),
        "logit_scale other than 1 is not served",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_directory_is_refused_by_name(what: str, backend: PagedBackend, tmp_path: Path) -> None:
    make, damage, message = DAMAGED[what]
    directory = make(tmp_path / "heads")
    damage(directory)
    with pytest.raises(ModelError, match=message) as caught:
        load_head(directory, backend)
    assert f"--heads {directory}" in str(caught.value)


def test_speculators_leaves_out_what_transformers_assumes(backend: PagedBackend, tmp_path: Path) -> None:
    directory = make_eagle(tmp_path / "heads", "speculators")
    layer = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
    del layer["hidden_size"], layer["vocab_size"]
    change_config(directory, transformer_layer_config=layer)
    with pytest.raises(
        ModelError, match="vocab_size is 32000; want 512"
    ):  # the default of Llama's configuration
        load_head(directory, backend)
