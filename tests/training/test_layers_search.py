"""The search for layers that draft: what is tried, what is measured, and the command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import make_tiny_target

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.early_exit import EarlyExit
from outrider.cloud_verifier.heads.loading import load_head
from outrider.training.heads import layers as searching
from outrider.training.heads.command import main
from outrider.training.heads.layers import Layers, Trial, replayed_tokens_a_round, search
from outrider.training.judge.target_text import written_texts

WANTED = (0, 1, 2, 6, 9, 11)


def score(layers: Layers) -> Trial:
    """Each wanted layer helps, each other one costs."""
    kept = set(layers)
    return Trial(layers, 2.0 + len(kept & set(WANTED)), 2.0 + 0.5 * len(kept - set(WANTED)))


def test_few_layers_are_tried_in_every_combination() -> None:
    trials = search(3, score, 6)
    assert len({trial.layers for trial in trials}) == 6 and (0, 1, 2) not in {t.layers for t in trials}
    assert [t.gain for t in trials] == sorted((t.gain for t in trials), reverse=True)
    assert trials[0].layers == (0, 1)


def test_many_layers_are_searched_near_the_best_set_none_of_them_twice() -> None:
    asked: list[Layers] = []

    def measure(layers: Layers) -> Trial:
        asked.append(layers)
        return score(layers)

    trials = search(12, measure, 150)
    assert len(asked) == len(set(asked)) == 150 and all(0 < len(each) < 12 for each in asked)
    assert asked[0] == (0,) and (*range(11),) in asked[:37], "the first sets are exits"
    assert trials[0].gain >= 0.9 * score(WANTED).gain
    assert search(12, score, 150) == trials, "the same seed finds the same"


@pytest.mark.parametrize("layers", [(0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounds_are_replayed_as_a_verifier_has_them(
    layers: Layers, temperature: float, tmp_path: Path
) -> None:
    from benchmarks.heads.service import Case, Service

    backend = load_target(make_tiny_target(tmp_path / "target"), kv_bytes=32 << 20)
    source = EarlyExit(backend, layers, "")
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3)]
    texts = list(written_texts(backend, prompts, temperature, 20))
    assert all(len(text.new) == 20 for text in texts)
    cases = [Case(text.prompt, text.sampling, source.name, 3, False) for text in texts]
    written = Service(backend, [source]).write(cases, 20)
    assert [tuple(each.token_ids) for each in written] == [text.new for text in texts]
    wanted = 19 * 2 / sum(each.num_steps for each in written)
    assert replayed_tokens_a_round(source, texts, 3) == wanted
    backend.check_integrity()
    assert backend.kv_usage.num_used == 0


def test_the_command_writes_a_directory_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, text, out = make_tiny_target(tmp_path / "target"), tmp_path / "text.py", tmp_path / "out"
    text.write_text("def function_1(self, value_7): return value_3\n" * 20)
    options = "--num-passages 4 --num-prompt-tokens 8 --num-new-tokens 6 --chain 2 --temperature 0"
    command = [
        "heads",
        "layers",
        "--target",
        str(target),
        "--text",
        str(text),
        "--out",
        str(out),
        *options.split(),
    ]
    monkeypatch.setattr(searching, "TIMED_ROUNDS", 2)
    monkeypatch.setattr("sys.argv", command)
    main()
    record = json.loads((out / "layers.json").read_text())
    assert len(record["tried"]) == 6 and record["judged"]["layers"] == record["tried"][0]["layers"]
    head = load_head(out, load_target(target))
    assert isinstance(head, EarlyExit) and list(head.layers) == record["judged"]["layers"]
    shown = capsys.readouterr()
    assert "6 of 6" in shown.err and f"{out}, on passages kept apart" in shown.out


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("llama", "--text nowhere.py", "--text nowhere.py: No such file"),
        ("gpt2", "--text {}", "early exit wants an architecture that our own decoder runs"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    arch: str, options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, text = make_tiny_target(tmp_path / "target", arch), tmp_path / "text.py"
    text.write_text("def function_1(self, value_7): return value_3\n" * 20)
    given = options.format(text).split()
    monkeypatch.setattr(
        "sys.argv", ["heads", "layers", "--target", str(target), "--out", str(tmp_path), *given]
    )
    with pytest.raises(SystemExit, match=message):
        main()
