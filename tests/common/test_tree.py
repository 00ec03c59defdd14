"""The shape of a drafted tree: depths, paths, runs, ancestors, subtrees; and what is no tree."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.common.errors import InvalidFieldError
from outrider.common.tree import ROOT, Tree, check_parents, is_chain, likeliest_after


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 20) -> Tree:
    num_nodes = draw(st.integers(0, max_nodes))
    return Tree([draw(st.integers(ROOT, node - 1)) for node in range(num_nodes)])


@given(trees())
def test_everything_follows_from_the_paths(tree: Tree) -> None:
    paths = [tree.path(node) for node in range(len(tree))]
    for node, path in enumerate(paths):
        assert path[-1] == node and tree.parents[path[0]] == ROOT
        assert all(tree.parents[after] == before for before, after in pairwise(path))
        assert tree.depths[node] == len(path) - 1
        assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == path
        assert tree.below(node) == [each for each, its in enumerate(paths) if node in its and each != node]
    assert [node for run in tree.runs for node in run] == list(range(len(tree)))
    for run in tree.runs:
        assert paths[run[-1]][-len(run) :] == list(run)
    children = [child for node in range(ROOT, len(tree)) for child in tree.children(node)]
    assert sorted(children) == list(range(len(tree)))


@given(trees())
def test_a_subtree_has_the_paths_below_its_root(tree: Tree) -> None:
    for root in range(len(tree)):
        nodes, parents = tree.subtree(root)
        for place, node in enumerate(nodes):
            expected = tree.path(node)[len(tree.path(root)) :]
            assert [nodes[each] for each in Tree(parents).path(place)] == expected


def test_what_follows_a_path_is_the_likeliest_path_below_it() -> None:
    tokens, parents = (10, 11, 12, 13, 14, 15, 16), (-1, 0, 1, 0, -1, 4, 5)
    expected = {(): (10, 11, 12), (10,): (11, 12), (10, 13): (), (14,): (15, 16), (14, 15): (16,), (11,): ()}
    assert {path: likeliest_after(tokens, parents, path) for path in expected} == expected
    assert [likeliest_after((1, 2, 3), (), path) for path in ((), (1, 2), (2,))] == [(1, 2, 3), (3,), ()]


def test_a_chain_is_the_tree_with_one_leaf() -> None:
    assert is_chain(()) and is_chain((-1, 0, 1))
    assert not is_chain((-1, -1)) and not is_chain((-1, 0, 0))
    assert Tree((-1, 0, 1)).runs == [range(3)]
    assert Tree((-1, 0, 1, 0, -1)).runs == [range(3), range(3, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("parents", "token_ids", "reason"),
    [
        ((-1,), (1, 2), "1 entries for 2"),
        ((-1, 1), (1, 2), "want -1 to 0"),
        ((-1, -2), (1, 2), "want -1 to 0"),
        ((-1, 0, 0), (1, 2, 2), "second 2 after node 0"),
        ((-1,) * 5, (1, 2, 3, 4, 5), "at most 4"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_reason(
    parents: tuple[int, ...], token_ids: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as error:
        check_parents(parents, token_ids, 4)
    assert error.value.field == "parents"


def test_a_verifier_without_trees_says_so() -> None:
    with pytest.raises(InvalidFieldError, match="no trees"):
        check_parents((-1,), (1,), 0)
