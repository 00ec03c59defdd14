"""Exports of every architecture against transformers, on small random models of its real shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.sources.shapes import KINDS, NUM_TOKENS, export_probs, make_dir, source_probs
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.architectures import ARCHITECTURES
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.export.precision import FLOAT16, INT4, INT8
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.spec import HIDDEN

NUM_IDS = 48


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(5).integers(0, NUM_TOKENS, NUM_IDS).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_computes_what_transformers_does(
    kind: str, ids: list[int], tmp_path: Path
) -> None:
    hf_dir = make_dir(tmp_path / "hf", kind)
    wanted = source_probs(hf_dir, ids)
    lost = {}
    for precision in (FLOAT16, INT8, INT4):
        report = export_draft(hf_dir, tmp_path / precision, precision=precision)
        assert (report.precision, report.fallbacks) == (precision, {})
        found = export_probs(tmp_path / precision, ids)
        lost[precision] = float(np.abs(found - wanted).sum(-1).mean() / 2)
        if precision == FLOAT16:
            assert np.abs(found - wanted).max() < 5e-3
    assert (
        lost[FLOAT16] < 2e-3 < lost[INT8] < 0.04 < lost[INT4] < 0.3
    )  # a wrong rotation or norm moves more than half


def test_every_architecture_of_the_table_is_among_them() -> None:
    names = {config.architectures[0] for config in map(_with_architecture, KINDS)}
    assert names == set(ARCHITECTURES)


def _with_architecture(kind: str) -> Any:
    config_class, fields = KINDS[kind]
    config = config_class(**fields)
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


@pytest.mark.parametrize("kind", ["mistral, window of 8", "gemma2, window of 8", "gpt2", "phi, odd sizes"])
def test_a_node_of_a_tree_is_what_its_path_would_be_as_a_chain(kind: str, tmp_path: Path) -> None:
    """Deep enough that a window leaves committed tokens out; slots of siblings are no positions."""
    export_draft(make_dir(tmp_path / "hf", kind), tmp_path / "draft", precision=FLOAT16)
    prompt = [5, 9, 200, 17, 33, 8, 120, 44, 71, 3, 18]
    with OnnxDraftModel.open(tmp_path / "draft") as model:
        runner, _ = model.sequence(SamplingParams(temperature=1.0)).parts
        runner.feed(prompt, 0)
        # two siblings at position 11, then a child of the first
        hidden = np.float32(HIDDEN)
        bias = np.array([[0, hidden, hidden], [hidden, 0, hidden], [0, hidden, 0]], np.float32)
        nodes = runner.feed_nodes([50, 60, 70], [11, 11, 12], bias, 11).probs.copy()
        paths = []
        for path in ([50], [60], [50, 70]):
            runner.feed(prompt, 0)
            paths.append(runner.feed(path, len(prompt)).probs[0].copy())
    np.testing.assert_allclose(nodes, np.stack(paths), atol=1e-5)


def edit_config(hf_dir: Path, remove: tuple[str, ...], **changes: Any) -> None:
    path = hf_dir / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(content | changes))


OLD_FILES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", ("rope_parameters",), {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
    "phi": ("phi", ("rope_parameters",), {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}),
    "gemma says gelu": ("gemma", ("rope_parameters",), {"hidden_act": "gelu", "rope_theta": 10000.0}),
    "mistral": ("mistral, window of 8", ("rope_parameters",), {"rope_theta": 10000.0}),
    "gemma2 without types": ("gemma2, window of 8", ("layer_types", "rope_parameters"), {}),
    "qwen2 without types": ("qwen2, second layer slides", ("layer_types",), {}),
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_a_configuration_of_earlier_releases_is_the_same_model(name: str, tmp_path: Path) -> None:
    kind, remove, changes = OLD_FILES[name]
    hf_dir = make_dir(tmp_path / "hf", kind)
    new = export_draft(hf_dir, tmp_path / "new")
    edit_config(hf_dir, remove, **changes)
    old = export_draft(hf_dir, tmp_path / "old")
    assert old.fingerprint == new.fingerprint


@pytest.mark.parametrize("local", [{"rope_local_base_freq": 10_000.0}, {}], ids=["written", "left out"])
def test_gemma3_of_earlier_releases_has_two_bases_and_a_pattern(
    tmp_path: Path, local: dict[str, float]
) -> None:
    hf_dir = make_dir(tmp_path / "hf", "gemma3, window of 8")
    new = export_draft(hf_dir, tmp_path / "new")
    edit_config(
        hf_dir,
        ("layer_types", "rope_parameters", "_sliding_window_pattern"),
        rope_theta=1_000_000.0,
        sliding_window_pattern=2,
        **local,
    )
    assert export_draft(hf_dir, tmp_path / "old").fingerprint == new.fingerprint


def test_tensors_without_the_models_prefix_are_found(ids: list[int], tmp_path: Path) -> None:
    """GPT-2's own files are those of the model without its head."""
    hf_dir = make_dir(tmp_path / "hf", "gpt2")
    new = export_draft(hf_dir, tmp_path / "new")
    tensors = load_file(hf_dir / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): each for name, each in tensors.items()},
        hf_dir / "model.safetensors",
    )
    assert export_draft(hf_dir, tmp_path / "old").fingerprint == new.fingerprint


def test_a_weight_too_large_for_float16_is_kept_and_named(ids: list[int], tmp_path: Path) -> None:
    hf_dir = make_dir(tmp_path / "hf", "llama")
    tensors = load_file(hf_dir / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, 0] = 1e5
    save_file(tensors, hf_dir / "model.safetensors")
    report = export_draft(hf_dir, tmp_path / "draft", precision=FLOAT16)
    assert report.fallbacks == {name: "fp32"}
    spec = json.loads((tmp_path / "draft" / "draft.json").read_text())
    assert (spec["precision"], spec["fallbacks"]) == ("fp16", {name: "fp32"})
    assert np.abs(export_probs(tmp_path / "draft", ids) - source_probs(hf_dir, ids)).max() < 5e-3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "phi with norms": ("phi", {"qk_layernorm": True}, "norms of queries and keys"),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False}, "unscaled attention"),
    "another kind of layer": (
        "qwen3",
        {"layer_types": ["full_attention", "linear_attention"]},
        "linear_attention",
    ),
    "phi3 with long context": (
        "phi3, window of 8",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rope scaling 'longrope'",
    ),
    "types of other layers": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 of 2 layers"),
    "a window of none": ("gemma2, window of 8", {"sliding_window": 0}, "sliding_window is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_graph_does_not_compute_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    hf_dir = make_dir(tmp_path / "hf", kind)
    edit_config(hf_dir, (), **changes)
    with pytest.raises(ModelError, match=message):
        export_draft(hf_dir, tmp_path / "draft")


@pytest.mark.parametrize("is_file", [True, False])
def test_gguf_is_refused_with_the_way_to_go(is_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"Q4_K_M.gguf is GGUF, .*original safetensors"):
        export_draft(path if is_file else tmp_path, tmp_path / "draft")


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        ("llama", FLOAT16, "--precision int4"),
        ("llama, odd sizes", INT4, "a multiple of 32, not 60"),
        ("gpt2", INT4, "is a gpt2; MC dropout supports llama"),
    ],
)
def test_dropout_is_refused_where_its_branch_is_not_written(
    kind: str, precision: str, message: str, tmp_path: Path
) -> None:
    export_draft(make_dir(tmp_path / "hf", kind), tmp_path / "draft", precision=precision)
    with pytest.raises(ModelError, match=message):
        add_dropout(tmp_path / "draft")
