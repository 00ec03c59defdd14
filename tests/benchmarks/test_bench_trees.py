"""What `make bench-trees` counts as a round, and how it draws children for rejection sampling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.edge.self_written import self_written
from support.edge.tiny_draft import make_tiny_draft

from benchmarks.trees.coverage import MOST_CHILDREN, rejections
from benchmarks.trees.texts import accepted_nodes, chain, play, tree
from outrider.common.tree import Tree
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import Continuations, TreeBudget


def test_the_accepted_nodes_are_the_longest_path_that_begins_the_text() -> None:
    shape, token_ids = Tree((-1, 0, 1, 0, -1)), (5, 6, 7, 8, 9)
    assert accepted_nodes(shape, token_ids, (5, 8, 7)) == [0, 3]
    assert accepted_nodes(shape, token_ids, (9, 5)) == [4]
    assert accepted_nodes(shape, token_ids, (6,)) == []
    assert accepted_nodes(shape, token_ids, ()) == []


def test_rejection_sampling_accepts_an_equal_draft_at_once_and_leaves_a_share_that_q_never_has() -> None:
    rng = np.random.default_rng(3)
    same = np.full(6, 1 / 6)
    assert {rejections(same, same, rng) for _ in range(50)} == {1}
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.0, 0.5])
    tries = [rejections(p, q, rng) for _ in range(4000)]
    # The first child is token 0 with q = .5 and then accepted, else rejected; the residual then is all on
    # token 1, which q never draws.
    assert set(tries) == {1, MOST_CHILDREN + 1}
    assert abs(tries.count(1) / len(tries) - 0.5) < 0.04


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_the_draft_itself_writes_is_accepted_in_whole_rounds(
    temperature: float, tmp_path: Path
) -> None:
    with OnnxDraftModel.open(make_tiny_draft(tmp_path)) as model:
        text = self_written(model, temperature, 21)
        chains = play(model, [text], chain(4))
        values = NodeValues()
        trees = play(model, [text], tree(TreeBudget(4, 4, 1), values), learning=values)
    assert (chains.num_rounds, chains.num_tokens, chains.num_nodes) == (4, 20, 16)
    assert (trees.num_rounds, trees.num_tokens, trees.num_nodes) == (4, 20, 16)
    first = Continuations((1,), (0.0,), "draft")
    assert values.chances(first) > NodeValues().chances(first), "every token was among the continuations"
