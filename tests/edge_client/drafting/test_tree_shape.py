"""Files of fixed tree shapes: what they hold, and that a wrong one is refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.common.errors import ConfigError, UsageError
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.config.tree import tree_budget
from outrider.edge_client.drafting.tree_shape import read_tree_shape
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, TreeBudget

CHOICES = [[0], [0, 0], [1], [0, 1], [0, 0, 0]]
SHAPE = tuple(map(tuple, CHOICES))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"choices": CHOICES, "about": {"temperature": 0.8}}))
    return path


def test_the_first_nodes_of_a_shape_are_the_tree_of_that_size(file: Path) -> None:
    assert read_tree_shape(file) == SHAPE
    whole = tree_budget(run_config(tree=5, tree_shape=file))
    assert whole == TreeBudget(5, 3, MAX_CONTINUATIONS, shape=SHAPE)
    small = tree_budget(run_config(tree="3", tree_shape=str(file)))
    assert small == TreeBudget(3, 2, MAX_CONTINUATIONS, shape=SHAPE[:3])


def test_a_file_that_is_written_again_is_read_again(file: Path) -> None:
    assert len(read_tree_shape(file)) == 5
    file.write_text(json.dumps({"choices": [[0], [1]]}))
    assert read_tree_shape(file) == ((0,), (1,))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ([], "choices: expected a list of paths"),
        ({"about": 1}, "choices: expected a list of paths"),
        ({"choices": []}, "choices: expected a list of paths"),
        ({"choices": [[0]], "width": 4}, "width: unknown; expected choices, about"),
        ({"choices": [[0], 3]}, r"choices\[1\] 3 is no path"),
        ({"choices": [[]]}, r"choices\[0\] \[\] is no path"),
        ({"choices": [[True]]}, r"choices\[0\] \[true\] is no path"),
        ({"choices": [[0], [8]]}, r"choices\[1\] \[8\] is no path: expected a list of numbers from 0 to 7"),
        ({"choices": [[0], [0]]}, r"choices\[1\] \[0\] comes twice"),
        ({"choices": [[0], [1, 2], [1]]}, r"choices\[1\] \[1, 2\] comes before \[1\]"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=f"wrong\\.json.*{words}"):
        tree_budget(run_config(tree=1, tree_shape=path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        tree_budget(run_config(tree=1, tree_shape=tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "goes with --tree N, not with --tree auto"),
        ({"num_speculative_tokens": 4}, "goes with --tree N, not with --tree off"),
        ({"tree": "auto"}, "goes with --tree N, not with --tree auto"),
        ({"tree": 4, "mode": "co-located"}, "goes with --mode speculative or auto"),
        ({"tree": 4, "method": "sparse"}, "does not go with --method sparse"),
        ({"tree": 4, "tree_depth": 3}, "leave --tree-depth 3 out"),
        ({"tree": 4, "tree_width": 2}, "leave --tree-width 2 out"),
        ({"tree": 6}, "has 5 nodes: --tree 6 is more"),
    ],
)
def test_flags_that_do_not_go_with_a_shape_are_named(
    settings: dict[str, object], words: str, file: Path
) -> None:
    with pytest.raises(UsageError, match=rf"--tree-shape .*tree\.json .*{words}"):
        tree_budget(run_config(tree_shape=file, **settings))
