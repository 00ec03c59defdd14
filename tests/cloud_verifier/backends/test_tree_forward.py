"""Trees in the packed forward: a node has the logits of its path fed as a chain, and so has what follows the path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.twins import twin_of

from benchmarks.trees.keep import largest_difference, random_tree
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.exact_rows import check_forwards, check_trees
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.feeds import Feed, split_feeds
from outrider.cloud_verifier.kv.blocks import BlockTable
from outrider.common.errors import ModelError
from outrider.common.tree import Tree

TEXT = [(37 * i + 11) % 300 for i in range(600)]
CASES = [
    ("llama", "float32", "lean", "off"),
    ("llama", "float32", "lean", "on"),
    pytest.param(("qwen2", "float32", "transformers", "off"), marks=pytest.mark.slow),
    ("qwen2", "bfloat16", "lean", "on"),
    pytest.param(("gpt2", "float32", "transformers", "on"), marks=pytest.mark.slow),
    pytest.param(("mistral", "float32", "lean", "off"), marks=pytest.mark.slow),
    pytest.param(("mistral", "bfloat16", "lean", "on"), marks=pytest.mark.slow),
    ("gemma2", "float32", "transformers", "on"),
    ("gemma2", "float32", "lean", "on"),
    ("qwen3", "float32", "cuda", "off"),
    ("mistral", "bfloat16", "cuda", "on"),
    pytest.param(("gemma2", "float32", "cuda", "on"), marks=pytest.mark.slow),
    ("llama", "float32 fp8", "lean", "on"),
    ("qwen3", "bfloat16 fp8", "cuda", "on"),
    ("gpt2", "float32 fp8", "transformers", "on"),
]


@pytest.fixture(params=CASES, scope="module", ids=lambda case: "-".join(map(str, case)))
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> PagedBackend:
    arch, dtype, decoder, exact_rows = request.param
    dtype, _, kv_dtype = dtype.partition(" ")
    return load_target(
        target_of(arch),
        dtype=dtype,
        kv_dtype=kv_dtype or "auto",
        decoder=decoder,
        kv_tokens=4096,
        exact_rows=exact_rows,
    )


def score(backend: PagedBackend, start: int, fed: list[int]) -> Logits:
    """The rows of `fed` after TEXT[:start], one sequence alone."""
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, TEXT[:start], 0)])
    rows = backend.forward([ForwardItem(sequence, fed, len(fed))]).copy()
    backend.close(sequence)
    return rows


def agrees(backend: PagedBackend, found: Logits, expected: Logits) -> None:
    if backend.is_reproducible:
        assert np.array_equal(found, expected)
    else:
        assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("num_nodes", "starts"),
    [
        (3, (5, 60, 127)),
        pytest.param(17, (5, 60, 127), marks=pytest.mark.slow),
        (64, (60,)),
        pytest.param(64, (5, 127), marks=pytest.mark.slow),
    ],
)
def test_a_node_has_the_logits_of_its_path(
    backend: PagedBackend, num_nodes: int, starts: tuple[int, ...]
) -> None:
    """Alone and beside chains and another tree, across the ends of blocks and spans."""
    rng = np.random.default_rng(num_nodes)
    for start in starts:
        trees = [random_tree(rng, num_nodes), random_tree(rng, num_nodes // 2 + 1)]
        tokens = [[int(t) for t in rng.integers(0, 300, len(tree))] for tree in trees]
        sequences = [backend.new_sequence() for _ in range(4)]
        for sequence, length in zip(sequences, (start, start // 2 + 1, 9, 30), strict=True):
            backend.forward([ForwardItem(sequence, TEXT[:length], 0)])
        items = [
            ForwardItem(sequences[2], TEXT[9:14], 5),
            ForwardItem(
                sequences[0], [TEXT[start], *tokens[0]], num_nodes + 1, trees[0].parents
            ),  # after one of the text
            ForwardItem(sequences[1], tokens[1], len(trees[1]), trees[1].parents),
            ForwardItem(sequences[3], TEXT[30:31], 1),
        ]
        rows = backend.forward(items).copy()
        agrees(backend, rows[:5], score(backend, 9, TEXT[9:14]))
        agrees(backend, rows[-1:], score(backend, 30, TEXT[30:31]))
        parts = (6, start + 1, trees[0], tokens[0]), (6 + num_nodes, start // 2 + 1, trees[1], tokens[1])
        for first, length, tree, ids in parts:
            for run in tree.runs:  # every leaf's path
                path = tree.path(run[-1])
                expected = score(backend, length, [ids[node] for node in path])
                agrees(backend, rows[[first + node for node in path]], expected)
        for sequence in sequences:
            backend.close(sequence)
        backend.check_integrity()


def test_what_is_kept_of_a_tree_is_the_paths_kv(backend: PagedBackend) -> None:
    """Also where the blocks before the tree are shared: another sequence's KV stays as it was."""
    rng = np.random.default_rng(3)
    for start in (7, 33, 250):
        tree = random_tree(rng, 40)
        tokens = [int(t) for t in rng.integers(0, 300, len(tree))]
        node = int(np.argmax(tree.depths))
        path = tree.path(node)[: int(rng.integers(1, len(tree.path(node)) + 1))]
        sequence = backend.new_sequence()
        backend.forward([ForwardItem(sequence, TEXT[:start], 0)])
        twin = twin_of(backend, sequence, TEXT[:start])
        backend.forward([ForwardItem(sequence, tokens, 0, tree.parents)])
        backend.keep(sequence, start, path)
        assert sequence.length == start + len(path)
        backend.check_integrity()
        text = [tokens[each] for each in path]
        rows = backend.forward([ForwardItem(sequence, [1, 2, 3], 3)]).copy()
        agrees(backend, rows, score(backend, start, [*text, 1, 2, 3])[len(text) :])
        agrees(backend, backend.forward([ForwardItem(twin, [4], 1)]).copy(), score(backend, start, [4]))
        backend.close(sequence)
        backend.close(twin)
    backend.check_integrity()


@pytest.mark.slow
def test_ten_thousand_random_rounds_keep_what_a_fresh_prefill_computes(
    target_of: Callable[[str], Path],
) -> None:
    assert (
        largest_difference(load_target(target_of("llama"), kv_tokens=4096, exact_rows="off"), 10_000) < 1e-4
    )


def test_with_exact_rows_random_rounds_keep_its_bits(target_of: Callable[[str], Path]) -> None:
    assert largest_difference(load_target(target_of("llama"), kv_tokens=4096, exact_rows="on"), 200) == 0


def test_kv_that_is_kept_wrongly_would_be_noticed(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load_target(target_of("llama"), kv_tokens=4096, exact_rows="off")
    monkeypatch.setattr(
        backend, "keep", lambda sequence, start, nodes: backend.truncate(sequence, start + len(nodes))
    )
    assert largest_difference(backend, 200) > 1e-3


def test_a_forward_that_is_split_keeps_a_tree_whole() -> None:
    table, tree = BlockTable("a"), Tree((-1, 0, 0, -1))
    feeds = [Feed(table, 3, range(6), 1), Feed(table, 0, range(100, 107), 5, tree)]
    passes = [
        [(each.past, list(each.token_ids), each.num_logit_rows, each.tree) for each in part]
        for part in split_feeds(feeds, 8)
    ]
    assert passes == [
        [(3, list(range(6)), 1, None), (0, [100, 101], 0, None)],
        [(2, [102, 103, 104, 105, 106], 5, tree)],
    ]
    assert feeds[1].positions == [0, 1, 2, 3, 4, 4, 3]
    (first,) = split_feeds([Feed(table, 0, range(8), 8, Tree((-1, 0, 0, -1)))], 8)
    assert [each.num_logit_rows for each in first] == [8]


def test_a_tree_that_is_masked_in_place_is_caught(target_of: Callable[[str], Path]) -> None:
    """The negative control: right values, but other last bits than those of the chain."""
    backend = load_target(target_of("qwen2"), dtype="bfloat16", kv_tokens=2048, exact_rows="on")
    assert backend.has_trees and backend.max_tree_nodes == backend.row_plan.most  # type: ignore[union-attr]
    check_trees(backend)
    backend.planner = MaskedTrees(backend)
    with pytest.raises(ModelError, match="a tree"):
        check_trees(backend)
    assert backend.kv_usage.num_used == 0
    backend.check_integrity()


@pytest.mark.parametrize("check", [check_trees, check_forwards])
def test_a_check_that_fails_at_any_forward_leaves_no_sequence_open(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None]
) -> None:
    """As where the library refuses a product: the next way to multiply is tried with the same pool."""
    backend = load_target(target_of("qwen2"), dtype="bfloat16", kv_tokens=2048, exact_rows="on")
    forward = type(backend).forward
    for failing in itertools.count():
        forwards = itertools.count()

        def fail(*args: Any, forwards: Iterator[int] = forwards, failing: int = failing) -> Any:
            if next(forwards) == failing:
                raise RuntimeError("no such product")
            return forward(*args)

        monkeypatch.setattr(type(backend), "forward", fail)
        try:
            check(backend)
        except RuntimeError:
            assert backend.kv_usage.num_used == 0, failing
        else:
            break
    assert failing > 10 and backend.kv_usage.num_used == 0
    backend.check_integrity()


class MaskedTrees(AttentionPlanner):
    """Attends to trees by masks, and to the rest as the backend does."""

    def __init__(self, backend: PagedBackend) -> None:
        facts = backend.facts
        self._chains = backend.planner
        self._trees = SdpaPlanner(
            backend.blocks.block_size,
            backend.max_context,
            facts.num_heads // facts.num_kv_heads,
            getattr(torch, backend.dtype),
            torch.device("cpu"),
        )

    def plan(self, sequences):  # type: ignore[no-untyped-def]
        is_tree = any(each.tree is not None for each in sequences)
        return (self._trees if is_tree else self._chains).plan(sequences)
