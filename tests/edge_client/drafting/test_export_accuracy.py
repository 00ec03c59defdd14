"""Exported drafts against transformers with the same weights, dequantised from INT4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_dirs import make_hf_dir, reference_probs

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied, rope llama3": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, tied, rope 1e6": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2, padded vocabulary": ("qwen2", {"num_tokens": 500}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, untied, wide heads": ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "one layer, one kv head": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
}
NUM_IDS = 80


def total_variation(
    hf_dir: Path, out_dir: Path, accuracy_level: int, first_layers: int | None = None
) -> np.ndarray:
    """Of each of 80 positions, fed one at a time: `[80]`."""
    export_draft(hf_dir, out_dir, accuracy_level=accuracy_level, first_layers=first_layers)
    with OnnxDraftModel.open(out_dir) as model:
        ids = np.random.default_rng(5).integers(0, model.num_tokens, NUM_IDS).tolist()
        runner = model.sequence(SamplingParams(temperature=1.0))._runner
        assert runner is not None
        ours = np.stack([runner.feed([token], i).probs[0].copy() for i, token in enumerate(ids)])
        reference = reference_probs(hf_dir, ids, model.num_tokens, first_layers)
    return np.asarray(np.abs(ours - reference).sum(-1) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_draft_computes_what_its_dequantised_weights_say(kind: str, tmp_path: Path) -> None:
    """Level 1 keeps activations in float32, so only summation order differs: the graph is the model.
    Level 4, the default, rounds activations to int8 in blocks of 32, about 0.4 % of the largest of a
    block; through a few layers of random weights that moves a few per cent of probability. A wrong
    rotation, bias or norm moves more than half of it.
    """
    architecture, changes = KINDS[kind]
    hf_dir = make_hf_dir(tmp_path / "hf", architecture, **changes)
    assert total_variation(hf_dir, tmp_path / "exact", accuracy_level=1).max() < 1e-4
    rounded = total_variation(hf_dir, tmp_path / "int8", accuracy_level=4)
    assert rounded.mean() < 0.04
    assert rounded.max() < 0.10


def test_a_head_in_the_files_is_exported_also_where_the_configuration_ties_it(tmp_path: Path) -> None:
    """As fine-tuned models are saved; transformers ties the two only where they are alike."""
    from safetensors.torch import load_file, save_file

    hf_dir = make_hf_dir(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    tensors = load_file(hf_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    export_draft(hf_dir, tmp_path / "alike")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    export_draft(hf_dir, tmp_path / "other")
    rows = []
    for name in ("alike", "other"):
        with OnnxDraftModel.open(tmp_path / name) as model:
            runner = model.sequence(SamplingParams(temperature=1.0))._runner
            assert runner is not None
            rows.append(runner.feed([1, 2, 3], 0).logits[0, : model.num_tokens].copy())
    np.testing.assert_allclose(rows[1], rows[0][::-1], atol=0.1 * abs(rows[0]).max())
    assert not np.allclose(rows[1], rows[0], atol=0.1 * abs(rows[0]).max()), (
        "the other head's logits are others"
    )


def test_export_reports_what_it_wrote(tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    steps: list[tuple[int, int, str]] = []
    report = export_draft(hf_dir, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert set(report.files) == {"draft.json", "draft.onnx", "tokenizer.json"}
    assert report.num_bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    assert (report.architecture, report.max_context) == ("qwen2", 256)
    assert [step[2] for step in steps] == ["embedding", "layer 0", "layer 1", "head"]
    again = export_draft(hf_dir, tmp_path / "out")
    assert again.fingerprint == report.fingerprint


def test_large_weights_go_beside_the_graph_and_draft_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "llama")
    export_draft(hf_dir, tmp_path / "one")
    monkeypatch.setattr("outrider.edge_client.drafting.export.exporter._MAX_INLINE_BYTES", 1000)
    report = export_draft(hf_dir, tmp_path / "two")
    export_draft(hf_dir, tmp_path / "two")  # over the first, not behind it
    assert "draft.onnx.data" in report.files
    drafts = []
    for name in ("one", "two"):
        with OnnxDraftModel.open(tmp_path / name) as model:
            sequence = model.sequence(SamplingParams(temperature=1.0, seed=3))
            sequence.commit([1, 2, 3])
            drafts.append(sequence.propose(8))
    assert drafts[0] == drafts[1]
