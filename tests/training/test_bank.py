"""The bank of pairs, on a toy: built, recorded, and replayed by the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.controller import record_bank
from outrider.common.errors import UsageError
from outrider.experiments.shared.acceptance_traces import TRACES, find_traces, load_traces, save_traces
from outrider.experiments.shared.prompts import Prompt
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.parts import drafts
from outrider.experiments.simulator.parts.times import load_times
from outrider.experiments.simulator.run import play
from outrider.training.bank import command
from outrider.training.bank.pairs import BANK, PROMPT_LOOKUP, BankDraft, BankFolder, BankTarget, chosen
from outrider.training.bank.texts import PROSE, TABLES
from outrider.training.common.model import ModelConfig
from outrider.training.common.schedule import Phase
from outrider.training.data.corpus import Corpus

SHAPE = ModelConfig(
    64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    ffn_size=64,
    tied=True,
    vocab_size=320,
    context=256,
    family="qwen3",
)
TOY = BankTarget(
    "toy",
    "toy",
    (
        BankDraft("trained", size="32x1", tokens=256),
        BankDraft("first-layers", first_layers=1),
        BankDraft(PROMPT_LOOKUP),
        BankDraft("random", size="32x1"),
    ),
    SHAPE,
    tokens=512,
)
TEXT = "".join(f"row {number}, {number * 7 % 10}, {number * 3 % 10}\n" for number in range(400))


def toy_texts() -> tuple[Corpus, list[Prompt]]:
    prompts = [Prompt(str(start), TEXT[start : start + 60]) for start in (0, 100)]
    return Corpus([TEXT], [], {"held": TEXT[:100]}, {"sources": {}}), prompts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of a few steps, texts of a few tokens, one turn of each time."""
    monkeypatch.setitem(command.KINDS, "toy", toy_texts)
    phases = (Phase(0.0, 32, 4, 1), Phase(0.5, 32, 4, 2))
    monkeypatch.setattr(command, "TARGET", replace(command.TARGET, phases=phases, validation_tokens=600))
    draft = replace(
        command.DRAFT,
        phases=(Phase(0.0, 32, 4),),
        sample_rows=8,
        sample_prompt=8,
        sample_tokens=64,
    )
    monkeypatch.setattr(command, "DRAFT", draft)
    monkeypatch.setattr(record_bank, "NUM_TURNS", 1)


@pytest.mark.slow
@pytest.mark.ci
def test_a_pair_is_built_recorded_and_replayed_by_its_name(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command.build_bank(tmp_path / "bank", (TOY,))
    capsys.readouterr()
    command.build_bank(tmp_path / "bank", (TOY,))
    assert capsys.readouterr().out.splitlines() == ["toy: done"]  # all is kept
    folder = BankFolder(tmp_path / "bank", TOY)
    sets = list(record_bank.record(folder, num_texts=2, num_positions=24))
    assert [traces.name for traces in sets] == [
        f"toy/{draft.name} T={temperature}" for draft in TOY.drafts for temperature in ("0", "0.7", "1")
    ]
    save_traces(tmp_path / "bank-toy.npz", sets)
    monkeypatch.setattr(drafts, "find_traces", partial(find_traces, folder=tmp_path))
    for traces in sets:
        found = find_traces(traces.name, tmp_path)
        assert [text.runs.tolist() for text in found.texts] == [text.runs.tolist() for text in traces.texts]
        assert (found.times, found.coverage) == (traces.times, traces.coverage)
        is_copying = PROMPT_LOOKUP in traces.name
        assert (found.texts[0].confidences.shape[1] == 0, found.texts[0].gaps is None) == (is_copying,) * 2
        assert found.times is not None and load_times(found.times).verifier.step_ms >= 0
    again = list(record_bank.time_again(folder, sets))
    assert [(each.name, each.texts) for each in again] == [(each.name, each.texts) for each in sets]
    group = {"acceptance": f"toy/{PROMPT_LOOKUP} T=0", "link": {"rtt_ms": 20}, "output_tokens": 24}
    system = load_system({"seconds": 60, "times": "none", "edges": [{**group, "requests": 2}]})
    total = figures_of(play(system)).total
    assert total.num_tokens == 48


def test_a_bank_that_is_not_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run `make pair-bank` first"):
        list(record_bank.record(BankFolder(tmp_path, TOY), 1, 1))
    with pytest.raises(UsageError, match="--only novels: choose from embedded, prose, tables"):
        chosen("prose,novels")


def test_targets_differ_in_shape_and_every_one_has_a_draft_without_a_model() -> None:
    shapes = [target.model for target in BANK if target.model is not None]
    assert len(shapes) >= 2
    facts = [(shape.vocab_size, shape.num_layers, shape.hidden_size, shape.family) for shape in shapes]
    assert all(len(set(values)) == len(shapes) for values in zip(*facts, strict=True))
    assert all(PROMPT_LOOKUP in [draft.name for draft in target.drafts] for target in BANK)


def test_files_are_of_one_kind_at_most() -> None:
    for name, kind in (
        ("a/METADATA", PROSE),
        ("README.md", PROSE),
        ("LICENSE.txt", PROSE),
        ("x.csv", TABLES),
    ):
        assert [each for each in (PROSE, TABLES) if each.takes(Path(name))] == [kind]
    assert not any(kind.takes(Path("module.py")) for kind in (PROSE, TABLES))


@pytest.mark.parametrize("target", BANK, ids=lambda target: target.name)
def test_the_recorded_traces_are_those_of_the_bank(target: BankTarget) -> None:
    sets = load_traces(TRACES / f"bank-{target.name}.npz")
    assert [traces.name for traces in sets] == [
        f"{target.name}/{draft.name} T={temperature:g}"
        for draft in target.drafts
        for temperature in record_bank.TEMPERATURES
    ]
    for traces in sets:
        assert traces.times is not None and load_times(traces.times).verifier.step_ms > 0
    assert sum(path.stat().st_size for path in TRACES.glob("bank-*.npz")) < 3_000_000
