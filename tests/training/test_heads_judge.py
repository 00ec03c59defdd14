"""Judging heads: choices by score and noise, rounds replayed by hand, and the command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import make_tiny_target

from outrider.common.errors import UsageError
from outrider.common.noise.draws import gumbel_row
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.tree_shape import read_tree_shape
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS
from outrider.training.heads.directory import write_heads
from outrider.training.heads.figures import HeadsJudge
from outrider.training.heads.judge import judge, parse_args
from outrider.training.heads.model import Heads, HeadsShape
from outrider.training.heads.rounds import (
    cartesian_shape,
    cartesian_widths,
    expected_tokens,
    replayed_tokens_a_round,
)
from outrider.training.judge.target_text import WrittenText

NONE = MAX_CONTINUATIONS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), vocab=448, hidden=64, num_layers=2)


def test_rounds_take_the_longest_path_in_the_tree_and_one_token_more() -> None:
    shape = ((0,), (1,), (0, 0))
    text = [[0, 0], [1, 0], [NONE, 0], [0, 2], [0, 0], [0]]
    # From 0 two nodes and the bonus: 3 tokens; from 3 one node (0, 2 is no path) and the correction; then the last.
    assert replayed_tokens_a_round([text], shape) == 6 / 3
    assert replayed_tokens_a_round([text, text], ()) == 1
    assert replayed_tokens_a_round([[]], shape) == 0


def test_the_best_cartesian_tree_is_found() -> None:
    rates = [[0.5, 0.2, *[0.0] * 6], [0.4, 0.3, *[0.0] * 6]]
    assert cartesian_widths(rates, 3) == (1, 2), (
        "1 + 0.5 + 0.5 × 0.7, not 1 + 0.7, nor 1 + 0.7 × 1.4 with 4 nodes"
    )
    assert cartesian_shape((1, 2)) == ((0,), (0, 0), (0, 1))
    assert expected_tokens(rates, cartesian_shape((2, 1))) == pytest.approx(1 + 0.7 * 1.4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_choices_are_ranks_of_the_text_by_the_heads_scores_and_the_noise(
    temperature: float, target: Path
) -> None:
    heads = Heads(HeadsShape("hydra", 2, 1), 64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in heads.parameters():
            param.normal_(std=0.1, generator=generator)
    judge = HeadsJudge(target)
    prompt, sampling = (5, 6, 7), SamplingParams(temperature=temperature, seed=9)
    ids: list[int] = list(prompt)
    found: list[int] = []
    with torch.no_grad():
        for _ in range(
            8
        ):  # a text whose tokens are choices 0, 1, … of the first head, from the second token on
            model = judge.target.model(input_ids=torch.tensor([[*ids, 11]])).last_hidden_state[0]
            embedded = judge.target.get_input_embeddings().weight
            if len(ids) == 3:
                ids.append(11)
                continue
            row = heads.heads[0](model[len(ids) - 2], [embedded[ids[-1]]])
            scores = (judge.target.lm_head(row) / (temperature or 1.0)).double().numpy()
            if temperature:
                scores = scores + gumbel_row(9, len(ids), 448)
            ids.append(int(np.argsort(-scores)[len(found)]))
            found.append(len(found))
    choices = judge.choices(heads, WrittenText(prompt, tuple(ids[3:]), sampling))
    assert [path[0] for path in choices] == found == list(range(7))
    assert [len(path) for path in choices] == [2] * 6 + [1]


def test_the_command_writes_a_shape_that_is_read_and_figures(target: Path, tmp_path: Path) -> None:
    heads, text = tmp_path / "heads", tmp_path / "code.txt"
    write_heads(Heads(HeadsShape("medusa", 2, 1), 64), target, heads)
    text.write_text("def function_1(self, value_7): return value_3 + 1\n" * 20)
    given = (
        f"--heads {heads} --target {target} --text {text} --num-passages 4 --num-new-tokens 12 --num-nodes 5"
    )
    figures = judge(parse_args(given.split()))[heads]
    assert [each.temperature for each in figures] == [0.0, 0.8]
    assert all(1 <= each.tokens_a_round <= 3 and each.num_texts == 2 for each in figures)
    assert read_tree_shape(heads / "tree.json")
    record = json.loads((heads / "evaluation.json").read_text())
    assert record["num_nodes"] == 5 and len(record["judged"]) == 2
    other = make_tiny_target(tmp_path / "other", vocab=448, hidden=64, num_layers=1)
    with pytest.raises(UsageError, match=r"--heads .* are of another target than --target"):
        judge(parse_args(given.replace(str(target), str(other)).split()))
    text.write_text("a")
    with pytest.raises(UsageError, match="--text: one passage is not enough"):
        judge(parse_args(given.split()))
