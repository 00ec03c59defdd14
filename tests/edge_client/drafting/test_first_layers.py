"""A model's first layers as a draft, against the same layers in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_dirs import make_hf_dir
from test_export_accuracy import total_variation

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.export.exporter import export_draft

NUM_LAYERS = 4
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


@pytest.mark.parametrize("first_layers", [1, 3, NUM_LAYERS])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layers_compute_what_they_do_in_transformers(
    kind: str, first_layers: int, tmp_path: Path
) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", kind, num_hidden_layers=NUM_LAYERS, **KINDS[kind])
    distances = total_variation(hf_dir, tmp_path / "draft", accuracy_level=1, first_layers=first_layers)
    assert distances.max() < 1e-4


def test_the_draft_says_what_it_is_a_part_of(tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "llama", num_hidden_layers=NUM_LAYERS)
    whole = export_draft(hf_dir, tmp_path / "whole")
    part = export_draft(hf_dir, tmp_path / "part", first_layers=1)
    assert (part.num_layers, part.num_source_layers) == (1, NUM_LAYERS)
    spec = json.loads((tmp_path / "part" / "draft.json").read_text())
    assert (spec["num_layers"], spec["num_source_layers"]) == (1, NUM_LAYERS)
    assert "num_source_layers" not in json.loads((tmp_path / "whole" / "draft.json").read_text())
    # 64-wide attention with 2 of 4 heads for keys and values, 96-wide MLP, two norms
    per_layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert whole.num_parameters - part.num_parameters == 3 * per_layer
    assert whole.fingerprint != part.fingerprint


def test_all_layers_are_the_whole_model(tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "llama", num_hidden_layers=NUM_LAYERS)
    whole = export_draft(hf_dir, tmp_path / "whole")
    assert export_draft(hf_dir, tmp_path / "same", first_layers=NUM_LAYERS).fingerprint == whole.fingerprint


@pytest.mark.parametrize("first_layers", [-1, 0, NUM_LAYERS + 1])
def test_a_number_out_of_range_is_refused_with_the_range(first_layers: int, tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "llama", num_hidden_layers=NUM_LAYERS)
    with pytest.raises(UsageError, match=rf"--first-layers {first_layers}: .* has layers 1 to {NUM_LAYERS}"):
        export_draft(hf_dir, tmp_path / "draft", first_layers=first_layers)
    assert not (tmp_path / "draft").exists()
