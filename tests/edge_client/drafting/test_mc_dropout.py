"""MC dropout: keyed masks, the branch against transformers, and a draft that is otherwise the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from draft_dirs import make_hf_dir, reference_model

from outrider.common.errors import ModelError, UsageError
from outrider.common.noise.philox import Purpose
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.commands.cli import main
from outrider.edge_client.config.run_config import default_draft_dir
from outrider.edge_client.drafting.export import dropout_graph
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.drafting.rows.dropout import Candidates, fill_masks, top_variance

SAMPLED = SamplingParams(temperature=0.8, seed=11)
PROMPT = [5, 9, 200, 17, 33, 8, 120]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied, biases": ("llama", {"tie_word_embeddings": False, "mlp_bias": True}),
    "qwen2, tied, padded": ("qwen2", {"tie_word_embeddings": True, "num_tokens": 500}),
    "qwen3, one layer": ("qwen3", {"num_hidden_layers": 1}),
}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# ------------------------------------------------------------------------------------------- masks


def make_masks(num_samples: int, width: int, *, rate: float = 0.1, seed: int = 3, position: int = 9) -> Any:
    masks = np.empty((num_samples, 1, width), np.float32)
    fill_masks(masks, rate, seed, position)
    return masks


def test_a_mask_is_a_function_of_seed_position_and_sample() -> None:
    masks = make_masks(8, 300)
    assert (masks == make_masks(8, 300)).all()
    assert (masks[:2] == make_masks(2, 300)).all()  # fewer samples are the first of more
    for other in (make_masks(8, 300, seed=4), make_masks(8, 300, position=10), masks[::-1]):
        assert (masks != other).mean() > 0.1


def test_masks_drop_their_share_and_keep_the_mean() -> None:
    masks = make_masks(16, 50_000, rate=0.25)
    assert set(np.unique(masks)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (masks == 0).mean() == pytest.approx(0.25, abs=0.003)
    np.testing.assert_allclose((masks == 0).mean(axis=(1, 2)), 0.25, atol=0.01)


def test_a_mask_comes_from_its_lane_of_the_noise() -> None:
    counter = np.array([0, 9, 0, 0], np.uint64)
    bits = np.random.Philox(key=np.array([3, Purpose.DROPOUT], np.uint64), counter=counter)
    lanes = bits.random_raw(600).astype("<u8").view("<u4")
    kept = (lanes >= round(0.1 * 2**32)).reshape(4, 1, 300)
    np.testing.assert_array_equal(make_masks(4, 300), kept * np.float32(1 / 0.9))


# ---------------------------------------------------------------------------------------- variance


def test_the_variance_is_that_of_the_most_probable_ids_log_probability() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32) * 3
    variance = top_variance(Candidates(np.arange(50), logits))
    assert variance == pytest.approx(np.log(softmax(logits.astype(float))[:, 0]).var(ddof=1), rel=1e-5)


def test_logits_have_no_zero_point() -> None:
    logits = np.array([[2, 1, 0], [1, 2, 0]], np.float32)
    moved = logits + np.array([[100], [-300]], np.float32)
    one, other = (top_variance(Candidates(np.arange(3), each)) for each in (logits, moved))
    assert one == other == pytest.approx(0.5, rel=1e-6)  # ln p differs by 1


def test_logits_that_explode_under_a_mask_are_probabilities_still() -> None:
    dropped = np.array([[5000, 0], [0, 5000]], np.float32)
    assert top_variance(Candidates(np.arange(2), dropped)) == pytest.approx(5000**2 / 2)


# ------------------------------------------------------------------------------------- the variant


@pytest.mark.parametrize("kind", KINDS)
def test_the_branch_computes_what_masked_inputs_give_in_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every id a candidate, and activations in float32 (level 1), only summation order differs."""
    monkeypatch.setattr(dropout_graph, "NUM_CANDIDATES", 512)
    architecture, changes = KINDS[kind]
    hf_dir = make_hf_dir(tmp_path / "hf", architecture, **changes)
    export_draft(hf_dir, tmp_path / "draft", accuracy_level=1)
    add_dropout(tmp_path / "draft", num_samples=3, rate=0.2)
    with OnnxDraftModel.open(tmp_path / "draft", has_variance=True) as model:
        assert model.dropout is not None
        masks = make_masks(3, model.dropout.width, rate=0.2, seed=11, position=len(PROMPT))
        (signals,) = propose(model, PROMPT, num=1).signals
        runner, _ = (sequence := model.sequence(SAMPLED)).parts
        candidates = runner.feed(PROMPT, 0).candidates
        assert candidates is not None
        found = np.empty((3, model.num_tokens))
        found[:, candidates.ids] = candidates.logits
        expected = np.stack([masked_logits(hf_dir, mask[0], model.num_tokens) for mask in masks])
        np.testing.assert_allclose(found, expected, atol=2e-3, rtol=1e-3)
        logs = np.log(softmax(expected)[:, candidates.ids[0]])
        assert signals.variance == pytest.approx(logs.var(ddof=1), rel=0.02)
        sequence.close()


def masked_logits(hf_dir: Path, mask: np.ndarray, num_tokens: int) -> np.ndarray:
    """After PROMPT, the inputs of the last MLP's matrices times their part of `mask`."""
    model = reference_model(hf_dir)
    mlp = model.model.layers[-1].mlp
    sizes = [mlp.gate_proj.in_features, mlp.down_proj.in_features]
    assert sum(sizes) == len(mask)
    into_mlp, inside = torch.split(torch.from_numpy(mask), sizes)
    for module, part in ((mlp, into_mlp), (mlp.down_proj, inside)):
        module.register_forward_pre_hook(lambda _, inputs, part=part: (inputs[0] * part,))
    with torch.no_grad():
        return np.asarray(model(torch.tensor([PROMPT])).logits[0, -1, :num_tokens], np.float64)


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dropout")
    hf_dir = make_hf_dir(root / "hf", "qwen2", num_tokens=500)
    export_draft(hf_dir, root / "onnx")
    add_dropout(root / "onnx")
    return root / "onnx"


@pytest.fixture(scope="module")
def variant(draft_dir: Path) -> Iterator[OnnxDraftModel]:
    with OnnxDraftModel.open(draft_dir, has_variance=True) as model:
        yield model


def propose(model: OnnxDraftModel, *commits: list[int], num: int = 6, seed: int = 11) -> Draft:
    sequence = model.sequence(replace(SAMPLED, seed=seed))
    for token_ids in commits:  # each is fed in one go: other groups of tokens differ in the last digits
        sequence.commit(token_ids)
        draft = sequence.propose(num)
    sequence.check_integrity()
    sequence.close()
    return draft


def variances(draft: Draft) -> list[float]:
    return [each.variance for each in draft.signals if each.variance is not None]


def test_the_variant_drafts_what_the_draft_does_and_leaves_the_same_kv(
    draft_dir: Path, variant: OnnxDraftModel
) -> None:
    with OnnxDraftModel.open(draft_dir) as plain:
        one, other = plain.sequence(SAMPLED), variant.sequence(SAMPLED)
        for tokens in (PROMPT, [1, 2, 3]):
            for sequence in (one, other):
                sequence.commit(tokens)
            draft, varied = one.propose(8), other.propose(8)
            assert len(variances(varied)) == 8 and not variances(draft)
            without = tuple(replace(each, variance=None) for each in varied.signals)
            assert replace(varied, signals=without) == draft
        kv, its_kv = (sequence.parts[0]._kv for sequence in (one, other))
        assert all((kv[name].array == its_kv[name].array).all() for name in kv)


def test_the_variance_depends_on_text_and_seed_alone(variant: OnnxDraftModel) -> None:
    draft = propose(variant, PROMPT, [77, 78])
    assert min(variances(draft)) > 0
    sequence = variant.sequence(SAMPLED)
    sequence.commit(PROMPT)
    sequence.propose(6)
    sequence.commit([7, 7])  # other than drafted, and taken back
    sequence.propose(3)
    sequence.truncate(len(PROMPT))
    sequence.commit([77, 78])
    assert sequence.propose(6) == draft
    other = propose(variant, PROMPT, [77, 78], seed=12)
    assert variances(other)[0] != variances(draft)[0]


def test_the_variance_does_not_look_at_the_sampled_token(variant: OnnxDraftModel) -> None:
    greedy = variant.sequence(replace(SAMPLED, temperature=0.0))
    greedy.commit(PROMPT)
    first, chosen = greedy.propose(1).signals[0], propose(variant, PROMPT, num=1).signals[0]
    assert first.variance == chosen.variance and first.nll != chosen.nll


def test_a_renewed_sequence_has_the_masks_of_its_new_seed(variant: OnnxDraftModel) -> None:
    sequence = variant.sequence(replace(SAMPLED, seed=99))
    sequence.commit(PROMPT)
    sequence.propose(2)
    sequence.rest()
    sequence.renew(SAMPLED, None, 0)
    sequence.commit(PROMPT)
    (fresh,) = variances(propose(variant, PROMPT, num=1))
    assert variances(sequence.propose(1)) == pytest.approx([fresh], rel=1e-4)


# ------------------------------------------------------------------------------------- files, flags


def test_the_variant_reads_the_drafts_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file with the graph, and beside it."""
    hf_dir = make_hf_dir(tmp_path / "hf", "llama", tie_word_embeddings=False)
    drafts = {}
    for place, most in (("inside", 1 << 30), ("beside", 0)):
        monkeypatch.setattr("outrider.edge_client.drafting.export.exporter._MAX_INLINE_BYTES", most)
        export_draft(hf_dir, tmp_path / place)
        graph = onnx.load(add_dropout(tmp_path / place), load_external_data=False).graph
        matrices = [constant for constant in graph.initializer if constant.name.endswith(".packed")]
        assert len(matrices) == 2 * 4 + 2  # four a layer, embedding and head
        assert all(each.data_location == onnx.TensorProto.EXTERNAL for each in matrices)
        with OnnxDraftModel.open(tmp_path / place, has_variance=True) as model:
            drafts[place] = propose(model, PROMPT)
    assert drafts["inside"] == drafts["beside"]


def test_the_embedded_variant_is_what_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded, copy = default_draft_dir(), tmp_path / "draft"
    shutil.copytree(embedded, copy)
    (copy / "draft.dropout.onnx").unlink()
    assert main(["draft", "add-dropout", str(copy)]) == 0
    assert "8 masks a token at rate 0.1" in capsys.readouterr().out
    written, ours = ((folder / "draft.dropout.onnx").read_bytes() for folder in (copy, embedded))
    assert written == ours


def test_export_writes_the_variant_and_never_leaves_an_old_one(tmp_path: Path) -> None:
    hf_dir, out = make_hf_dir(tmp_path / "hf", "llama"), tmp_path / "out"
    numbers = ["--mc-dropout-samples", "4", "--mc-dropout-rate", "0.3"]
    assert main(["draft", "export", str(hf_dir), str(out), "--mc-dropout", *numbers]) == 0
    with OnnxDraftModel.open(out, has_variance=True) as model:
        assert model.dropout is not None
        assert (model.dropout.num_samples, model.dropout.rate) == (4, 0.3)
    assert main(["draft", "export", str(hf_dir), str(out), "--first-layers", "1"]) == 0
    assert not (out / "draft.dropout.onnx").exists()


def test_a_draft_without_the_variant_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    export_draft(make_hf_dir(tmp_path / "hf", "llama"), tmp_path / "out")
    with pytest.raises(UsageError, match=r"no variant for MC dropout .*edge-client draft add-dropout .*/out"):
        create_draft_model("model", tmp_path / "out", has_variance=True)


def test_a_variant_of_another_draft_is_refused(tmp_path: Path, draft_dir: Path) -> None:
    copy = Path(shutil.copytree(draft_dir, tmp_path / "draft"))
    spec = (copy / "draft.json").read_text()
    with OnnxDraftModel.open(draft_dir) as model:
        (copy / "draft.json").write_text(spec.replace(model.fingerprint, "0" * 64))
    with pytest.raises(ModelError, match="made for another draft"):
        OnnxDraftModel.open(copy, has_variance=True)


def test_what_has_no_model_cannot_vary(draft_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"--gate-variance .* --draft-strategy prompt-lookup"):
        create_draft_model("prompt-lookup", draft_dir, has_variance=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mc-dropout", "--mc-dropout-samples", "1"], "--mc-dropout-samples 1: a variance needs 2 to 64"),
        (["--mc-dropout", "--mc-dropout-rate", "0.95"], "--mc-dropout-rate 0.95: want a share"),
        (["--mc-dropout-rate", "0.2"], "--mc-dropout-rate says nothing without --mc-dropout"),
    ],
)
def test_numbers_out_of_range_are_refused_before_an_export(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draft", "export", str(tmp_path / "none"), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
