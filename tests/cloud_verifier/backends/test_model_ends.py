"""What drafts from a model of transformers embeds and scores as the model does; else heads are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import WINDOWED, make_tiny_target

from outrider.cloud_verifier.backends import model_ends
from outrider.cloud_verifier.backends.base import ForwardItem, open_sequence
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.probes import EMBEDDINGS, check_model_ends
from outrider.common.errors import ModelError

TEXT = [7, 3, 200, 41, 7]
GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 6.0}
CASES: dict[str, dict[str, Any]] = {
    "gemma2": WINDOWED["gemma2"] | {"final_logit_softcapping": 1.5},
    "granite": GRANITE,
    "cohere": {"logit_scale": 0.25},
    "cohere2": WINDOWED["cohere2"],
    "gpt_neox": {},
    "phi": {},
}


def load(directory: Path, arch: str, **fields: Any) -> PagedBackend:
    model = make_tiny_target(directory / "model", arch, **fields)
    return load_target(model, decoder="transformers", kv_tokens=256, exact_rows="off")


@pytest.mark.parametrize("arch", CASES)
def test_states_are_scored_and_ids_embedded_as_in_a_forward(arch: str, tmp_path: Path) -> None:
    backend = load(tmp_path, arch, **CASES[arch])
    last = backend.facts.num_layers
    backend.feature_layers = (EMBEDDINGS, last)
    with open_sequence(backend) as sequence, torch.inference_mode():
        logits = backend.forward([ForwardItem(sequence, TEXT, len(TEXT))])
        scored = backend.decoder.score(backend.features[last])
        embedded = backend.decoder.embed(torch.tensor(TEXT))
    torch.testing.assert_close(scored, torch.from_numpy(logits))
    torch.testing.assert_close(embedded, backend.features[EMBEDDINGS])
    check_model_ends(backend)
    assert backend.kv_usage.num_used == 0 and backend.features == {} and backend.num_forwards == 0


def test_positions_that_are_added_to_embeddings_are_not_theirs(tmp_path: Path) -> None:
    check_model_ends(load(tmp_path, "gpt2"))


@pytest.mark.parametrize(("name", "what"), [("score", "a logit"), ("embed", "an embedding")])
def test_where_a_scale_is_not_known_heads_are_refused(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load(tmp_path, "granite", **GRANITE)
    ends = {
        "score": lambda model, states: model.get_output_embeddings()(states),
        "embed": lambda model, token_ids: model.get_input_embeddings()(token_ids),
    }
    monkeypatch.setattr(model_ends, name, ends[name])
    with pytest.raises(ModelError, match=f"cannot have heads: .* as {what} is off by"):
        check_model_ends(backend)


def test_a_model_that_transforms_its_states_before_they_are_scored_has_no_heads(tmp_path: Path) -> None:
    backend = load(tmp_path, "bert", is_decoder=True, num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"cannot have heads: .* as a logit is off by"):
        check_model_ends(backend)
