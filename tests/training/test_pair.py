"""Distilling, exporting and judging a toy pair; replayed rounds against hand-counted ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training.common.metrics import acceptance, overlap, repeated_share
from outrider.training.common.model import create_model, save_model
from outrider.training.common.schedule import Phase
from outrider.training.draft.distiller import DistillConfig, Distiller
from outrider.training.judge.evaluate import OnnxDraft
from outrider.training.pair.command import parse_args
from tests.training.test_target import TOY, toy_stream

DRAFT = replace(TOY, hidden_size=32, num_layers=1, tied=True, context=128)
CONFIG = DistillConfig(
    model=DRAFT,
    tokens=64 * 120,
    phases=(Phase(0.0, 16, 4),),
    sample_rows=8,
    sample_prompt=4,
    sample_tokens=16,
    target_text_tokens=300,
    num_threads=1,
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = create_model(TOY)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    directory = tmp_path_factory.mktemp("target")
    save_model(model, directory)
    return directory


def test_a_draft_comes_nearer_its_target_resumes_and_is_saved_quantised(
    target_dir: Path, tmp_path: Path
) -> None:
    from outrider.training.draft.quant import fake_quantize

    distiller = Distiller(CONFIG, target_dir, toy_stream(), tmp_path)
    figures = distiller.train()
    assert figures is not None
    assert figures["loss"] < 0.7 * distiller.history[0]["loss"]
    matrix = distiller.model.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(fake_quantize(matrix), matrix, rtol=0, atol=0)
    resumed = Distiller(CONFIG, target_dir, toy_stream(), tmp_path)
    assert resumed.resume()
    assert resumed.state == distiller.state


def test_the_exported_graph_gives_the_fake_quantised_models_logits(target_dir: Path, tmp_path: Path) -> None:
    from outrider.edge_client.drafting.export.exporter import export_draft
    from outrider.training.data.tokenizer import save_tokenizer, train_tokenizer
    from outrider.training.draft.quant import quantize_in_place

    torch.manual_seed(0)
    tokenizer = train_tokenizer(["def f(x): return x"], 300)
    draft = create_model(replace(DRAFT, vocab_size=tokenizer.get_vocab_size()))
    quantize_in_place(draft)
    save_model(draft, tmp_path / "hf", torch.float32)
    save_tokenizer(tokenizer, tmp_path / "hf", 128)
    export_draft(tmp_path / "hf", tmp_path / "int4")
    ids = np.arange(5, 25, dtype=np.int64)
    with torch.no_grad():
        expected = draft(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    found = OnnxDraft(tmp_path / "int4").logits(ids)
    # Activations are rounded to int8 inside the graph: 1 % of the logits' spread.
    np.testing.assert_allclose(found, expected, atol=0.02 * float(np.abs(expected).max()))


def test_rounds_are_replayed_from_matches() -> None:
    match = np.array([True, True, False, True, False, True], dtype=np.bool_)
    # Draft length 2: [1 1] + bonus (any), then from 3: [1 0] + correction, then from 5: [1] at the end.
    found = acceptance([match], 2)
    assert found.acceptance_rate == pytest.approx(4 / 5)
    assert found.tokens_per_round == pytest.approx(6 / 3)
    assert found.per_position == [1.0, pytest.approx(1 / 3)]


def test_a_draft_that_never_matches_still_commits_one_token_a_round() -> None:
    found = acceptance([np.zeros(7, dtype=np.bool_)], 4)
    assert (found.acceptance_rate, found.tokens_per_round) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no text"):
        acceptance([], 4)


def test_repeated_runs_and_overlap() -> None:
    assert repeated_share([list(range(40))]) == 0.0
    assert repeated_share([[1, 2, 3] * 20]) == pytest.approx(1 - 3 / 49)
    logits = np.array([[0.0, 1.0, 2.0]], dtype=np.float32)
    assert overlap(logits, logits, 0.8) == pytest.approx(1.0)
    far = np.array([[100.0, 0.0, 0.0]], dtype=np.float32)
    assert overlap(far, far[:, ::-1].copy(), 0.8) == pytest.approx(0.0, abs=1e-6)


def test_minutes_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--minutes-target", "0"])
    assert "above 0" in capsys.readouterr().err
