"""Ways to attend over the pool against plain attention written out; what is padded, what is tried at load."""

from __future__ import annotations

import logging
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud_verifier.backends.attention.host import HostPlanner
from outrider.cloud_verifier.backends.attention.packing import (
    MAX_BATCHED_LENGTH,
    MAX_BATCHED_QUERIES,
    PackedSequence,
    group_similar,
)
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule, PagedAttention
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.attention.tiled import TiledPlanner
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.probes import probe, use_paged_kernel
from outrider.cloud_verifier.server.cli import describe_target
from outrider.common.tree import ROOT, Tree
from outrider.kernels.kv_pool import KVPool
from outrider.kernels.reference import paged_attention

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
    sequences: list[PackedSequence],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    seen = [slots[-(rule.window or len(slots)) :] for each in sequences for slots in seen_slots(each)]
    arrays = (each.numpy() for each in (query, keys, values))
    assert rule.scaling is not None
    return torch.from_numpy(paged_attention(*arrays, seen, rule.scaling, rule.softcap)).float()


def seen_slots(sequence: PackedSequence) -> Iterator[list[int]]:
    """The pool's slots that each query of a sequence sees."""
    blocks = sequence.block_ids
    slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(sequence.length)]
    for stop in range(sequence.past, sequence.root):
        yield slots[: stop + 1]
    for node in range(len(sequence.tree or ())):
        assert sequence.tree is not None
        yield [*slots[: sequence.root], *(slots[sequence.root + each] for each in sequence.tree.path(node))]


SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=9,
)


def attended(
    planner: AttentionPlanner,
    sequences: Sequence[PackedSequence],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    return planner.plan(sequences)(query, KVPool(keys), KVPool(values), rule)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, is_scattered=st.booleans(), num_kv_heads=st.sampled_from((1, 2, 4)))
def test_any_mix_of_sequences_attends_as_each_would_alone(
    shapes: list[tuple[int, int]], is_scattered: bool, num_kv_heads: int
) -> None:
    sequences = pack(shapes, is_scattered=is_scattered)
    query, keys, values = tensors(sequences, 4, num_kv_heads)
    planner = SdpaPlanner(BLOCK_SIZE, 128, 4 // num_kv_heads, torch.float32, CPU)
    found = attended(planner, sequences, query, keys, values, AttentionRule(0.3))
    torch.testing.assert_close(
        found, plain(sequences, query, keys, values, AttentionRule(0.3)), atol=2e-5, rtol=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, chance=st.randoms(use_true_random=False), num_kv_heads=st.sampled_from((1, 2, 4)))
def test_trees_beside_chains_attend_to_their_paths_by_every_planner(
    shapes: list[tuple[int, int]], chance: random.Random, num_kv_heads: int
) -> None:
    sequences = pack(shapes, is_scattered=True)
    for each in sequences:
        if each.num_queries > 1 and chance.random() < 0.7:
            num_nodes = chance.randint(1, each.num_queries)
            each.tree = Tree([chance.randint(ROOT, node - 1) for node in range(num_nodes)])
    query, keys, values = tensors(sequences, 4, num_kv_heads)
    rule = AttentionRule(0.3)
    for is_fp8 in (False, True):
        pools = [KVPool.holding(each, is_fp8=is_fp8) for each in (keys, values)]
        expected = plain(sequences, query, *(pool.read(slice(None)).view(keys.shape) for pool in pools), rule)
        sdpa = SdpaPlanner(BLOCK_SIZE, 200, 4 // num_kv_heads, torch.float32, CPU)
        tiled = TiledPlanner(BLOCK_SIZE, 4 // num_kv_heads, torch.float32, CPU)
        host = HostPlanner(BLOCK_SIZE, 1)
        for planner in (sdpa, tiled) if is_fp8 else (sdpa, tiled, host):
            found = planner.plan(sequences)(query, *pools, rule)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


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
    expected = plain(sequences, query, keys, values, rule)
    for planner in (
        SdpaPlanner(BLOCK_SIZE, 200, 4 // num_kv_heads, torch.float32, CPU),
        TiledPlanner(BLOCK_SIZE, 4 // num_kv_heads, torch.float32, CPU),
        HostPlanner(BLOCK_SIZE, 2),
    ):
        found = attended(planner, sequences, query, keys, values, rule)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 8), (2, 24), (4, 13)])
@pytest.mark.parametrize("window", [None, 50])
def test_on_a_cpu_a_row_has_the_same_bits_alone_among_others_and_by_many_threads(
    num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    length, block_size, rule = 390, 16, AttentionRule(window=window)
    pools = [
        KVPool(torch.randn((30, block_size, num_kv_heads, head_dim), generator=generator)) for _ in range(2)
    ]
    query = torch.randn((4, length, head_dim), generator=generator)
    blocks = torch.randperm(30, generator=generator).tolist()

    def attend(num_threads: int, *parts: tuple[int, int]) -> torch.Tensor:
        """Of queries first … stop − 1 of the sequence, as sequences of their own."""
        rows, sequences, start = list[int](), [], 0
        for first, stop in parts:
            sequences.append(PackedSequence(start, stop - first, stop, blocks[: -(-stop // block_size)]))
            rows += range(first, stop)
            start += stop - first
        return HostPlanner(block_size, num_threads).plan(sequences)(query[:, rows], *pools, rule)

    whole = attend(1, (0, length))
    assert torch.equal(attend(3, (0, length)), whole)
    assert torch.equal(attend(2, (100, 140), (0, 100), (140, length))[40:140], whole[:100])
    for first, stop in ((0, 1), (63, 64), (64, 66), (128, 133), (255, 256), (380, 390)):
        assert torch.equal(attend(1, (first, stop)), whole[first:stop]), first
        assert torch.equal(attend(1, (7, 9), (first, stop), (200, 231))[2:-31], whole[first:stop]), first


@pytest.mark.parametrize("what", ["key", "value"])
def test_what_is_no_number_stays_so_on_a_cpu(what: str) -> None:
    """The rows that see a NaN are NaN; those of the sequence before it are as they were."""
    sequences = pack([(4, 20), (1, 9)], is_scattered=True)
    query, keys, values = tensors(sequences, 4, 2)
    rule, planner = AttentionRule(0.3), HostPlanner(BLOCK_SIZE, 1)
    expected = attended(planner, sequences, query, keys, values, rule)
    pool = keys if what == "key" else values
    pool[sequences[0].block_ids[18 // BLOCK_SIZE], 18 % BLOCK_SIZE] = float("nan")
    found = attended(planner, sequences, query, keys, values, rule)
    assert found[2:4].isnan().all() and torch.equal(found[[0, 1, 4]], expected[[0, 1, 4]])


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


# ------------------------------------------------------------------------------- tried before it is used


class KernelPlanner(SdpaPlanner):
    """Stands in for the planner of the kernel."""

    def __init__(self, block_size: int, num_groups: int, device: torch.device, **options: object) -> None:
        super().__init__(block_size, 1024, num_groups, torch.float32, device)


class Wrong(KernelPlanner):
    """Is wrong about trees alone."""

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        return super().plan([replace(each, tree=None) for each in sequences])


class NotANumber(KernelPlanner):
    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        attention = super().plan(sequences)
        return lambda *layer: attention(*layer) * torch.nan


class Refused(KernelPlanner):
    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        raise ValueError("a GPU of another kind")


@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (KernelPlanner, ""),
        (Wrong, "attention is off by"),
        (NotANumber, "attention is off by nan"),
        (Refused, "a GPU of another kind"),
        (None, "attention.paged halted"),  # as where Triton is missing
    ],
)
def test_a_model_runs_through_the_kernel_only_if_its_numbers_stay_the_same(
    target_of: Callable[[str], Path],
    planner: type[KernelPlanner] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = load_target(target_of("qwen3"), block_size=2, exact_rows="off")
    before = backend.planner
    name = "outrider.cloud_verifier.backends.attention.paged"
    module = planner and types.SimpleNamespace(PagedPlanner=planner)
    monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level(logging.WARNING, "outrider"):
        use_paged_kernel(backend, probe(backend))
    backend.device = "cuda"
    words = describe_target(backend)
    if reason:
        assert backend.planner is before and not backend.has_paged_kernel
        assert "the paged attention kernel is not used" in caplog.text and reason in caplog.text
        assert "cuda without the paged attention kernel, " in words
    else:
        assert isinstance(backend.planner, KernelPlanner) and backend.has_paged_kernel
        assert not caplog.text and "cuda, " in words


@pytest.mark.parametrize(
    ("share", "kv_dtype", "is_used"), [(0.1, "auto", False), (0.1, "fp8", True), (0.4, "fp8", False)]
)
def test_logits_over_kv_in_fp8_may_differ_by_more(
    target_of: Callable[[str], Path], share: float, kv_dtype: str, is_used: bool
) -> None:
    """Last bits in which two right ways to attend differ become a step of FP8's: a 7B model was refused the kernel."""
    backend = load_target(target_of("llama"), dtype="bfloat16", kv_dtype=kv_dtype, exact_rows="off")
    module = types.SimpleNamespace(PagedPlanner=KernelPlanner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "outrider.cloud_verifier.backends.attention.paged", module)
        reference = probe(backend)
        use_paged_kernel(backend, reference + share * max(1.0, float(abs(reference).max())))
    assert backend.has_paged_kernel is is_used


def test_logits_that_differ_drop_the_kernel(target_of: Callable[[str], Path]) -> None:
    """As where a decoder's tensors have strides that it misreads: attention itself is right."""
    backend = load_target(target_of("llama"), exact_rows="off")
    module = types.SimpleNamespace(PagedPlanner=KernelPlanner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "outrider.cloud_verifier.backends.attention.paged", module)
        use_paged_kernel(backend, probe(backend) + 9.0)
    assert not backend.has_paged_kernel and type(backend.planner) is SdpaPlanner
