"""Functions of the target's own: which are kept, and that a target trained on them writes more such."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training.common.model import create_model, save_model
from outrider.training.common.schedule import Phase
from outrider.training.common.workers import SOLO
from outrider.training.target.polish import PolishConfig, Writer, heads_by_length, keep, polish
from outrider.training.target.unlikelihood import UnlikelihoodConfig
from tests.training.test_target import CONFIG, TOY, toy_stream
from tests.training.toy_code import LINES, toy_functions, toy_tokenizer

POLISH = PolishConfig(
    samples=4,
    num_tokens=12,
    most_rows=64,
    training=replace(
        CONFIG,
        tokens=64 * 60,
        phases=(Phase(0.0, 16, 4, functions=1.0),),
        unlikelihood=UnlikelihoodConfig(start=2.0),
    ),
)
HEAD, BAD = [1, 2], LINES.index("    x = (3\n")


@pytest.mark.parametrize(
    ("new", "kept"),
    [
        ([20, 21, 0, BAD], [20, 21]),
        ([20, 21, 1, BAD], [20, 21]),  # another definition begins
        ([20, 21], None),  # did not end
        ([20, BAD, 0], None),
        ([0, 20, 21], None),
        ([*range(20, 28), *range(20, 28), 0], None),  # parses, and repeats itself
    ],
)
def test_a_function_is_kept_that_ends_and_parses_and_repeats_nothing(
    new: list[int], kept: list[int] | None
) -> None:
    assert keep(HEAD, new, toy_tokenizer()) == (None if kept is None else [0, *HEAD, *kept])


def test_heads_are_what_is_written_behind() -> None:
    heads = heads_by_length(toy_functions(5), toy_tokenizer(), longest=8)
    assert {length: rows.tolist() for length, rows in heads.items()} == {2: [HEAD] * 5}
    assert heads_by_length(toy_functions(5), toy_tokenizer(), longest=1) == {}


def _parsing_share(directory: Path) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    writer = Writer(POLISH, model, toy_tokenizer(), SOLO)
    writer.write(toy_functions(100))
    assert writer.num_written == 400
    return writer.num_kept / writer.num_written


def test_a_polished_target_writes_more_functions_that_parse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_model(create_model(TOY), tmp_path / "target")
    toy_tokenizer().save(str(tmp_path / "target/tokenizer.json"))
    np.savez(tmp_path / "train.npz", train=toy_stream())
    np.savez(tmp_path / "functions.npz", functions=toy_functions(100))
    before = _parsing_share(tmp_path / "target")
    figures = polish(POLISH, tmp_path, tmp_path / "target", tmp_path / "out", SOLO)
    assert figures is not None and figures["own_functions"]["written"] == 400
    assert 0 < figures["own_functions"]["kept"] < 400
    assert _parsing_share(tmp_path / "out") > before + 0.2
