"""The paged attention kernel under Triton's interpreter, on CPU tensors: its values, its bits, and a target through it.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import make_tiny_target

from benchmarks.gpu_check.attention_cases import (
    MAX_ERROR,
    RULES,
    Batch,
    LengthSplits,
    Part,
    Sizes,
    changed_rows,
    make_text,
    random_batch,
)
from outrider.cloud_verifier.backends.attention import paged
from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.paged import PagedPlanner
from outrider.cloud_verifier.backends.attention.plan import AttentionRule
from outrider.cloud_verifier.backends.exact_rows import check_attention, use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.probes import probe, use_paged_kernel
from outrider.common.errors import ModelError
from outrider.common.models import memory
from outrider.common.tree import Tree
from outrider.kernels.paged_attention import KEYS, early_tokens, num_splits

CPU = torch.device("cpu")
SPLIT = 64  # so that short texts have several, all alike; twice as many, and the first ones are shorter
SMALL = Sizes(3, 1)
FP8 = Sizes(is_fp8=True)


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(7, 1, 64), Sizes(2, 2, 24, 4), FP8], ids=str)
def test_chains_and_trees_have_the_attention_of_float64(sizes: Sizes, dtype: torch.dtype) -> None:
    """Sizes that are no powers of two, blocks of 4 and 16, 1 to 64 queries, blocks from all over the pool."""
    batch = random_batch(sizes, dtype, "cpu", seed=sizes.head_dim, num_parts=3)
    # The interpreter rounds towards zero to bfloat16, keys and values of FP8 too.
    most = (2 if sizes.is_fp8 and dtype == torch.bfloat16 else 1) * MAX_ERROR[dtype]
    for rule in RULES if sizes.num_kv_heads == 1 else RULES[:1]:
        assert batch.error(sizes.planner("cpu", SPLIT), rule) <= most, rule


def test_a_wrong_block_is_seen() -> None:
    """The negative control of the values: other tokens have other numbers."""
    batch = random_batch(SMALL, torch.float32, "cpu", seed=3, num_parts=2)
    planner = SMALL.planner("cpu", SPLIT)
    right = batch.attend(planner)
    first, second = (each.block_ids for each in batch.sequences)
    batch.sequences[0].block_ids = [*second[:1], *first[1:]]
    assert not torch.allclose(batch.attend(planner), right, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "rule", "is_fp8"),
    [
        pytest.param(torch.float32, RULES[0], False, marks=pytest.mark.slow),
        pytest.param(
            torch.bfloat16, AttentionRule(window=KEYS + 9, softcap=4.0), False, marks=pytest.mark.slow
        ),
        pytest.param(torch.bfloat16, RULES[0], True, marks=pytest.mark.slow),
        (torch.bfloat16, AttentionRule(window=KEYS + 9, softcap=4.0), True),
    ],
    ids=str,
)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, rule: AttentionRule, is_fp8: bool) -> None:
    sizes = replace(SMALL, is_fp8=is_fp8)
    changed = changed_rows(sizes.planner("cpu", 2 * SPLIT), sizes, dtype, "cpu", 2 * SPLIT, rule)
    assert set(changed.values()) == {0} and len(changed) == 5, changed


def test_splits_by_a_sessions_length_are_caught() -> None:
    changed = changed_rows(LengthSplits(SMALL, "cpu", SPLIT), SMALL, torch.float32, "cpu", SPLIT)
    assert changed["all queries"] and changed["beside others"] and changed["a path of a tree"], changed


def test_a_forward_of_very_many_rows_is_several_launches_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [Part(make_text(SMALL, 90, seed), 50, 90) for seed in range(2)]  # of two splits
    batch = Batch(SMALL, parts, torch.float32, "cpu")
    planner = SMALL.planner("cpu", SPLIT)
    assert [len(tiles) for tiles in planner._launches(batch.sequences)] == [6]
    whole = batch.attend(planner)
    monkeypatch.setattr(paged, "ATTENTION_PARTS", 90)
    assert [len(tiles) for tiles in planner._launches(batch.sequences)] == [2, 2, 2]
    assert torch.equal(batch.attend(planner), whole)


def test_launches_compute_in_the_memory_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what a step is said to take."""
    shapes = ((50, 90), (50, 90), (50, 200))
    parts = [Part(make_text(SMALL, length, length), count, length) for count, length in shapes]
    batch = Batch(SMALL, parts, torch.float32, "cpu")
    for module in (paged, memory):
        monkeypatch.setattr(module, "ATTENTION_PARTS", 90)
    attention = SMALL.planner("cpu", SPLIT).plan(batch.sequences)
    attention(batch.query, batch.keys, batch.values, AttentionRule())
    assert len(attention.launches) > 4
    tensors = [each for part in attention.parts for each in (part.tops, part.totals, part.sums)]
    num_bytes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    step = memory.step_bytes(SMALL.num_heads, SMALL.head_dim, vocab_size=0, itemsize=4, step_tokens=0)
    assert step // 2 < sum(num_bytes.values()) <= step


def test_a_tile_of_a_very_long_sequence_takes_no_more_than_a_launch_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch(SMALL, [Part(make_text(SMALL, 200, 1), 50, 200)], torch.float32, "cpu")
    planner = SMALL.planner("cpu", SPLIT)
    whole = batch.attend(planner)
    monkeypatch.setattr(paged, "ATTENTION_PARTS", 16)
    launches = planner.plan(batch.sequences).launches
    assert max(index.num_rows * index.num_splits for _, index in launches) <= 16
    assert torch.equal(batch.attend(planner), whole)


def test_splits_are_counted_as_the_kernel_divides_positions() -> None:
    for split in (SPLIT, 2 * SPLIT):
        starts = [*range(0, split, early_tokens(split)), *range(split, 5 * split, split)]
        for length in range(1, 5 * split):
            assert num_splits(length, split) == sum(start < length for start in starts)
    assert (early_tokens(512), num_splits(512, 512), num_splits(513, 512)) == (256, 2, 3)


def test_the_index_of_a_chain_and_a_tree() -> None:
    tree = Tree((-1, 0, -1))
    chain = PackedSequence(0, 2, 21, [4, 9])
    branching = PackedSequence(
        2, 4, 69, [3, 5, 7, 6, 8], tree=tree
    )  # its root is 66: one query comes before it
    planner = PagedPlanner(16, 3, CPU)
    (tiles,) = planner._launches([chain, branching])
    index = planner._index(tiles)
    assert (index.num_rows, index.num_tiles, index.num_splits) == (6, 2, 1)
    assert index.values.tolist() == [
        *(0, 2, 21, 24, 1, 0, 0, 0),  # runs at 24
        *(2, 4, 68, 42, 3, 0, 0, 0),  # at 42
        *(19, 20, 65, 66, 67, 66),  # positions
        *(4, 9),  # the chain's blocks, at 22
        *(0, 2, 0, 21, 22, 16),
        *(3, 5, 7, 6, 8),  # the tree's blocks, at 30
        *(8 * 16, 8 * 16 + 1, 8 * 16 + 2, 8 * 16 + 3),  # positions 64 … 67 on the path of node 1, at 35
        *(8 * 16, 8 * 16 + 1, 8 * 16 + 4),  # positions 64 … 66 on that of node 2, at 39
        *(0, 4, 0, 64, 30, 16),  # what comes before the tree, up to a multiple of 64
        *(0, 3, 64, 68, 35, 1),
        *(3, 1, 64, 67, 39, 1),
    ]


# ------------------------------------------------------------------------------- a target through it


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return make_tiny_target(folder / "llama", num_layers=1, max_context=2 * SPLIT + 1, hidden=32)


@pytest.mark.slow  # 15 s
def test_the_kernel_passes_its_probe_and_exact_rows_keep_it_and_trees(directory: Path) -> None:
    backend = load_target(directory, dtype="bfloat16", kv_tokens=512, exact_rows="off")
    use_paged_kernel(backend, probe(backend))
    assert backend.has_paged_kernel
    use_exact_rows(backend, "on")
    assert isinstance(backend.planner, PagedPlanner) and backend.is_reproducible and backend.has_trees


def test_a_planted_fault_is_found_at_load(directory: Path) -> None:
    backend = load_target(directory, kv_tokens=512, exact_rows="off")
    facts = backend.facts
    sizes = Sizes(facts.num_heads, facts.num_kv_heads, facts.head_dim)
    backend.planner = LengthSplits(sizes, "cpu", SPLIT)
    with pytest.raises(ModelError, match=r"attention over .* tokens depends on"):
        check_attention(backend)
