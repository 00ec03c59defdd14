"""Calibrated trees: accuracies of choices by depth, the greedy shape, and the command on a tiny pair."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.edge.self_written import self_written
from support.edge.tiny_draft import make_tiny_draft

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.tree_shape import read_tree_shape
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS
from outrider.training import calibrate_tree
from outrider.training.calibrate_tree import accuracies, best_shape, choices_taken

NONE = MAX_CONTINUATIONS


def padded(*values: float) -> list[float]:
    return [*values, *[0.0] * (MAX_CONTINUATIONS - len(values))]


def test_accuracies_are_of_paths_that_are_right_so_far_from_any_token_on() -> None:
    found = accuracies([[0, 1, NONE, 0]], 3)
    assert found[0] == padded(2 / 4, 1 / 4)
    assert found[1] == padded(0, 1 / 2), "after 0 comes 1, after 1 none; after the last 0 nothing is known"
    assert found[2] == padded(), "after 0 and 1 none"
    assert accuracies([], 2) == [padded(), padded()]


def test_the_shape_has_the_most_valuable_nodes_in_order() -> None:
    rng = random.Random(4)
    rates = []
    for _ in range(4):
        row = sorted((rng.random() for _ in range(MAX_CONTINUATIONS)), reverse=True)
        rates.append([each / sum(row) for each in row])
    values = {
        path: math.prod(rates[depth][rank] for depth, rank in enumerate(path))
        for length in range(1, 5)
        for path in itertools.product(range(MAX_CONTINUATIONS), repeat=length)
    }
    for num_nodes in (1, 7, 40):
        shape, tokens = best_shape(rates, num_nodes)
        best = sorted(values.values(), reverse=True)[:num_nodes]
        assert [values[path] for path in shape] == pytest.approx(best)
        assert tokens == pytest.approx(1 + sum(best))
        assert all(path[:-1] in ((), *shape[:place]) for place, path in enumerate(shape))


def test_nodes_that_were_never_right_are_left_out() -> None:
    shape, tokens = best_shape([padded(0.5), padded(0.5, 0.25)], 64)
    assert shape == ((0,), (0, 0), (0, 1)) and tokens == 1.875


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_a_text_that_the_draft_itself_writes_every_token_is_its_first_choice(
    temperature: float, tmp_path: Path
) -> None:
    with OnnxDraftModel.open(make_tiny_draft(tmp_path)) as model:
        text = self_written(model, temperature, 12)
        assert choices_taken(model, text) == [0] * 12
        other = replace(text, new=(text.new[0], (text.new[1] + 1) % model.num_tokens))
        assert choices_taken(model, other)[1] > 0


def test_the_command_writes_a_file_that_the_edge_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "code.txt", tmp_path / "tree.json"
    text.write_text("def read_lines(path):\n    with open(path) as file:\n        return file.read()\n" * 4)
    flags = f"--text {text} --out {out} --num-nodes 5 --num-passages 2 --num-new-tokens 12"
    monkeypatch.setattr(sys, "argv", ["calibrate_tree", *flags.split()])
    assert calibrate_tree.main() == 0
    shape = read_tree_shape(out)
    assert len(shape) == 5 and shape[0] == (0,)
    assert f"5 nodes on {max(map(len, shape))} levels" in capsys.readouterr().out
    text.write_text(" ")
    with pytest.raises(UsageError, match="--text"):
        calibrate_tree.main()
