"""Ways to attend over the pool against plain attention written out; what is padded, what is tried at load."""

from __future__ import annotations

import logging
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.varlen import reference_varlen_attn

from outrider.cloud_verifier.backends import varlen
from outrider.cloud_verifier.backends.attention import AttentionRule
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.packing import (
    MAX_BATCHED_LENGTH,
    MAX_BATCHED_QUERIES,
    PackedSequence,
    group_similar,
    make_varlen_index,
)
from outrider.cloud_verifier.backends.probes import probe, use_varlen_if_right
from outrider.cloud_verifier.backends.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.tiled import TiledPlanner
from outrider.cloud_verifier.backends.varlen import VarlenPlanner, find_page_size
from outrider.common.tree import ROOT, Tree

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def pack(
    shapes: list[tuple[int, int]], *, is_scattered: bool, block_size: int = BLOCK_SIZE
) -> list[PackedSequence]:
    """`shapes` are (queries, tokens in KV); blocks are handed out in order or from anywhere."""
    num_blocks = [-(-length // block_size) for _, length in shapes]
    free = list(range(1, sum(num_blocks) + 1))
    if is_scattered:
        np.random.default_rng(7).shuffle(free)
    sequences, start = [], 0
    for (num_queries, length), count in zip(shapes, num_blocks, strict=True):
        block_ids, free = free[:count], free[count:]
        is_run = block_ids == list(range(block_ids[0], block_ids[0] + count))
        sequences.append(PackedSequence(start, num_queries, length, block_ids, is_run))
        start += num_queries
    return sequences


def tensors(sequences: list[PackedSequence], num_heads: int, num_kv_heads: int) -> tuple[torch.Tensor, ...]:
    """query, key pool, value pool; what no token was written to is large, to be seen if it is read."""
    generator = torch.Generator().manual_seed(3)
    num_blocks = 1 + max(max(s.block_ids) for s in sequences)
    pools = []
    for _ in range(2):
        pool = torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, 8), 1e4)
        for sequence in sequences:
            for i in range(sequence.length):
                block_id = sequence.block_ids[i // BLOCK_SIZE]
                pool[block_id, i % BLOCK_SIZE] = torch.randn((num_kv_heads, 8), generator=generator)
        pools.append(pool)
    return torch.randn((num_heads, sequences[-1].stop, 8), generator=generator), *pools


def plain(
    sequences: list[PackedSequence], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Any:
    trees = SdpaPlanner(BLOCK_SIZE, 200, query.shape[0] // keys.shape[2], torch.float32, CPU)
    planner = VarlenPlanner(reference_varlen_attn, CPU, trees)
    return planner.plan(sequences)(query, keys, values, AttentionRule(0.3))


SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, is_scattered=st.booleans(), num_kv_heads=st.sampled_from((1, 2, 4)))
def test_any_mix_of_sequences_attends_as_each_would_alone(
    shapes: list[tuple[int, int]], is_scattered: bool, num_kv_heads: int
) -> None:
    sequences = pack(shapes, is_scattered=is_scattered)
    query, keys, values = tensors(sequences, 4, num_kv_heads)
    planner = SdpaPlanner(BLOCK_SIZE, 128, 4 // num_kv_heads, torch.float32, CPU)
    found = planner.plan(sequences)(query, keys, values, AttentionRule(0.3))
    torch.testing.assert_close(found, plain(sequences, query, keys, values), atol=2e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, chance=st.randoms(use_true_random=False), num_kv_heads=st.sampled_from((1, 2, 4)))
def test_trees_beside_chains_attend_alike_by_every_planner(
    shapes: list[tuple[int, int]], chance: random.Random, num_kv_heads: int
) -> None:
    """And a node of a tree as the last token of its path, alone."""
    sequences = pack(shapes, is_scattered=True)
    for each in sequences:
        if each.num_queries > 1 and chance.random() < 0.7:
            num_nodes = chance.randint(1, each.num_queries)
            each.tree = Tree([chance.randint(ROOT, node - 1) for node in range(num_nodes)])
    query, keys, values = tensors(sequences, 4, num_kv_heads)
    sdpa = SdpaPlanner(BLOCK_SIZE, 200, 4 // num_kv_heads, torch.float32, CPU)
    found = sdpa.plan(sequences)(query, keys, values, AttentionRule(0.3))
    tiled = TiledPlanner(BLOCK_SIZE, 4 // num_kv_heads, torch.float32, CPU)
    for other in (
        tiled.plan(sequences)(query, keys, values, AttentionRule(0.3)),
        plain(sequences, query, keys, values),
    ):
        torch.testing.assert_close(found, other, atol=2e-5, rtol=1e-5)
    for each in sequences:
        for node in range(len(each.tree or ())):
            assert each.tree is not None
            slots = [*range(each.root), *(each.root + before for before in each.tree.path(node))]
            row = each.stop - len(each.tree) + node
            expected = attend_to(each, slots, query[:, row], keys, values)
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    shapes=SHAPES,
    chance=st.randoms(use_true_random=False),
    num_kv_heads=st.sampled_from((1, 4)),
    window=st.sampled_from((None, 1, 3, 17, 60)),
    softcap=st.sampled_from((None, 2.0)),
)
def test_windows_and_soft_caps_by_every_planner(
    shapes: list[tuple[int, int]],
    chance: random.Random,
    num_kv_heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Of chains and trees: a row sees what is on its path, no further back than its window."""
    sequences = pack(shapes, is_scattered=chance.random() < 0.5)
    for each in sequences:
        if each.num_queries > 1 and chance.random() < 0.5:
            each.tree = Tree([chance.randint(ROOT, node - 1) for node in range(each.num_queries)])
    query, keys, values = tensors(sequences, 4, num_kv_heads)
    rule = AttentionRule(0.3, window, softcap)
    planners = [
        SdpaPlanner(BLOCK_SIZE, 200, 4 // num_kv_heads, torch.float32, CPU),
        TiledPlanner(BLOCK_SIZE, 4 // num_kv_heads, torch.float32, CPU),
    ]
    if softcap is None:
        planners.append(VarlenPlanner(reference_varlen_attn, CPU, planners[0]))  # type: ignore[arg-type]
    for planner in planners:
        found = planner.plan(sequences)(query, keys, values, rule)
        for each in sequences:
            for place, row in enumerate(each.rows):
                path = range(place + 1) if each.tree is None else each.tree.path(place)
                slots = [*range(each.past), *(each.past + before for before in path)]
                expected = attend_to(
                    each, slots[-(window or len(slots)) :], query[:, row], keys, values, softcap
                )
                torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=1e-5)


def attend_to(
    sequence: PackedSequence,
    slots: list[int],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention of one query [heads, head_dim] over some of a sequence's tokens."""
    places = [sequence.block_ids[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in slots]
    num_groups = query.shape[0] // keys.shape[2]
    k, v = (pool.flatten(0, 1)[places].repeat_interleave(num_groups, 1) for pool in (keys, values))
    scores = 0.3 * torch.einsum("hd,thd->ht", query, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)


@given(shapes=SHAPES)
def test_groups_hold_every_sequence_once_and_pad_little(shapes: list[tuple[int, int]]) -> None:
    sequences = pack(shapes, is_scattered=True)
    groups = group_similar(sequences)
    assert sorted((s for group in groups for s in group), key=lambda s: s.start) == sequences
    for group in groups:
        real = sum(s.length for s in group)
        assert len(group) == 1 or len(group) * max(s.length for s in group) < 3 * real
        assert [s.start for s in group] == sorted(s.start for s in group)


def test_alike_sequences_are_one_group_and_long_ones_attend_alone() -> None:
    verify = [(5, 200 + i) for i in range(8)]
    assert [len(g) for g in group_similar(pack(verify, is_scattered=True))] == [8]
    long = [(5, MAX_BATCHED_LENGTH + 1), (MAX_BATCHED_QUERIES + 1, 40), (1, 30), (1, 31)]
    assert sorted(len(g) for g in group_similar(pack(long, is_scattered=True))) == [1, 1, 2]


def test_the_index_of_a_ragged_batch() -> None:
    sequences = [
        PackedSequence(0, 1, 9, [4, 2, 7]),
        PackedSequence(1, 5, 5, [3, 1]),
        PackedSequence(6, 2, 4, [5]),
    ]
    index = make_varlen_index(sequences)
    assert (index.cu_seq_q, index.cu_seq_k, index.seqused_k) == ([0, 1, 6, 8], [0, 9, 14, 18], [9, 5, 4])
    assert index.block_table == [[4, 2, 7], [3, 1, 1], [5, 5, 5]]
    assert (index.max_q, index.max_k) == (5, 9)


# ------------------------------------------------------------------------------- tried before it is used


def find(kernel: Callable[..., torch.Tensor]) -> int | None:
    return find_page_size(kernel, num_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, device=CPU)


def test_the_first_page_size_that_works_is_taken() -> None:
    def only_256(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if key.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        return reference_varlen_attn(query, key, *args, **kwargs)

    assert find(reference_varlen_attn) == 16
    assert find(only_256) == 256


def test_a_torch_whose_kernel_reads_no_block_table_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_torch_2_11(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
        *, return_aux: Any = None, scale: float | None = None, window_size: Any = (-1, -1),
    ) -> None:  # fmt: skip
        pass

    module = types.SimpleNamespace(varlen_attn=of_torch_2_11)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    varlen.find_kernel.cache_clear()
    try:
        assert [varlen.find_kernel() for _ in range(2)] == [None, None]
    finally:
        varlen.find_kernel.cache_clear()
    assert caplog.text.count("variable-length attention is not used") == 1
    assert "lacks block_table, enable_gqa, num_splits, seqused_k" in caplog.text


def test_the_installed_torch_has_the_arguments_that_we_pass() -> None:
    assert varlen.find_kernel() is not None


def wrong_order(*args: Any, block_table: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return reference_varlen_attn(*args, block_table=block_table.sort(-1).values.contiguous(), **kwargs)


def unwritten_rows(*args: Any, **kwargs: Any) -> torch.Tensor:
    out = reference_varlen_attn(*args, **kwargs)
    out[1:] = float("nan")
    return out


def refused(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("block_table needs a newer kernel\nand a stack")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(wrong_order, "off by"), (unwritten_rows, "off by inf"), (refused, "block_table needs a newer kernel")],
)
def test_a_kernel_that_is_wrong_or_refuses_is_not_used(
    kernel: Callable[..., torch.Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert find(kernel) is None
    assert "variable-length attention is not used" in caplog.text and reason in caplog.text


@pytest.mark.parametrize("kernel", [reference_varlen_attn, unwritten_rows, refused])
def test_a_model_runs_through_the_kernel_only_if_its_logits_stay_the_same(
    target_of: Callable[[str], Path],
    kernel: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = load_target(target_of("qwen3"), block_size=2)
    planner = backend.planner
    monkeypatch.setattr(varlen, "find_kernel", lambda: kernel)
    with caplog.at_level(logging.WARNING):
        use_varlen_if_right(backend, probe(backend))
    assert isinstance(backend.planner, VarlenPlanner) == (kernel is reference_varlen_attn)
    assert bool(caplog.text) == (kernel is not reference_varlen_attn)
    texts = ([3, 1, 4, 1, 5], [9, 2, 6], [5] * 20)
    found = backend.forward([ForwardItem(backend.new_sequence(), text, 2) for text in texts])
    backend.planner = planner
    alone = [backend.forward([ForwardItem(backend.new_sequence(), text, 2)]).copy() for text in texts]
    np.testing.assert_allclose(found, np.concatenate(alone), atol=2e-4)
