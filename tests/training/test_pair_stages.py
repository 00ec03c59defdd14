"""`make pair` from stage to stage, in slices, on a toy."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.training.draft import distiller
from outrider.training.draft.restore import restore_draft
from outrider.training.pair.card import write_card
from outrider.training.pair.command import PairConfig, make_pair, parse_args
from outrider.training.target import polish
from outrider.training.target import train as target
from tests.training.test_pair import CONFIG as DRAFT_CONFIG
from tests.training.test_polish import POLISH
from tests.training.test_target import CONFIG, toy_stream
from tests.training.toy_code import toy_functions, toy_tokenizer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    """A run whose corpus is there, with toy presets."""
    monkeypatch.setitem(target.PRESETS, "cpu", CONFIG)
    monkeypatch.setitem(polish.PRESETS, "cpu", POLISH)
    monkeypatch.setitem(distiller.PRESETS, "cpu", DRAFT_CONFIG)
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    toy_tokenizer().save(str(tmp_path / "run/tokenizer/tokenizer.json"))
    (tmp_path / "run/data").mkdir()
    np.savez(tmp_path / "run/data/train.npz", train=toy_stream())
    np.savez(tmp_path / "run/data/functions.npz", functions=toy_functions(300))
    (tmp_path / "run/.done-corpus").touch()
    return PairConfig(
        run=tmp_path / "run",
        out=tmp_path / "out",
        draft_size="32x1",
        tokens_target=64 * 4,
        tokens_draft=64 * 3,
        num_threads=1,
        until="draft",
    )


def test_stages_follow_one_another_and_what_is_done_is_kept(
    config: PairConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(config)
    assert {path.name for path in config.run.glob(".done-*")} == {
        ".done-corpus",
        ".done-target",
        ".done-polish",
        ".done-draft",
    }
    assert (config.run / "draft/model.safetensors").is_file()
    assert not config.out.exists()
    make_pair(config)
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "corpus: done before, kept",
        "target: done before, kept",
        "polish: done before, kept",
        "draft: done before, kept",
        "draft: the same command without --until goes on",
    ]


def test_a_saved_draft_is_distilled_on(config: PairConfig, tmp_path: Path) -> None:
    make_pair(config)
    (config.run / "draft").rename(tmp_path / "earlier")
    (config.run / ".done-draft").unlink()
    make_pair(replace(config, draft=tmp_path / "earlier", draft_size="64x2"))
    figures = json.loads((config.run / "draft/training.json").read_text())
    assert [run["tokens"] for run in figures["before"]] == [64 * 3]
    assert figures["config"]["model"]["hidden_size"] == 32
    assert figures["config"]["rates"]["muon"] == DRAFT_CONFIG.rates.muon / 2


@pytest.mark.slow
@pytest.mark.ci
def test_a_pair_is_polished_and_distilled_on_from_what_was_installed(
    config: PairConfig, tmp_path: Path
) -> None:
    make_pair(replace(config, until="install"))
    first = json.loads((config.out / "training-polish.json").read_text())
    for path in config.run.iterdir():
        if path.name not in (".done-corpus", "data", "tokenizer"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = ["--warm-start", "--minutes-target", "0", "--draft", str(config.out / "draft")]
    options = {
        name: getattr(parse_args(again)[0], name) for name in ("warm_start", "minutes_target", "draft")
    }
    make_pair(replace(config, **options, tokens_target=None))
    restored, draft = config.run / "draft-before", config.run / "draft"
    assert (restored / "model.safetensors").is_file()
    assert json.loads((draft / "training.json").read_text())["before"][0]["tokens"] == 64 * 3
    polished = json.loads((config.run / "polished/training.json").read_text())
    assert polished["before"] == [
        *first["before"],
        {name: first[name] for name in ("tokens", "steps", "minutes")},
    ]


def test_a_restored_draft_exports_to_the_same_graph(tmp_path: Path) -> None:
    from outrider.edge_client.drafting.export.exporter import export_draft

    embedded = Path(__file__).parents[2] / "models/embedded/draft"
    restore_draft(embedded, tmp_path / "hf")
    export_draft(tmp_path / "hf", tmp_path / "int4")
    assert (tmp_path / "int4/draft.onnx").read_bytes() == (embedded / "draft.onnx").read_bytes()


def test_slices_of_one_command_make_the_same_target(config: PairConfig) -> None:
    whole, sliced = replace(config, until="target"), replace(config, until="target", slice_minutes=1e-6)
    make_pair(whole)
    expected = (whole.run / "target/model.safetensors").read_bytes()
    for path in [*(whole.run / "target").iterdir(), whole.run / ".done-target"]:
        path.unlink()
    for _ in range(3):
        make_pair(sliced)
        assert not (sliced.run / ".done-target").exists()
    make_pair(sliced)
    assert (sliced.run / "target/model.safetensors").read_bytes() == expected


def test_workers_are_two_on_a_cpu_and_one_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--device", "cuda"])[0].num_workers == 1
    with pytest.raises(SystemExit):
        parse_args(["--device", "cuda", "--workers", "2"])
    assert "a CUDA device takes one process" in capsys.readouterr().err


def test_a_card_is_written_from_the_committed_records(tmp_path: Path) -> None:
    embedded = Path(__file__).parents[2] / "models/embedded"
    for path in embedded.rglob("*"):
        if path.suffix == ".json" and path.parent == embedded:
            shutil.copyfile(path, tmp_path / path.name)
    for model in ("target", "draft"):
        (tmp_path / model).mkdir()
        shutil.copyfile(embedded / model / "tokenizer.json", tmp_path / model / "tokenizer.json")
    write_card(tmp_path)
    card = (tmp_path / "README.md").read_text()
    draft = json.loads((tmp_path / "training-draft.json").read_text())
    assert f"from the target, {draft['tokens'] / 1e6:.2f} M tokens in {draft['steps']} steps" in card
    assert "## Limits" in card
