"""What a tree's answer and a shared block change in the pools: at once on a CPU, with the next forward on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.twins import twin_of

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.cuda.pool_changes import PoolChanges
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend, PagedSequence
from outrider.cloud_verifier.backends.products.row_plan import RowPlan
from outrider.cloud_verifier.kv.blocks import BlockCopy
from outrider.cloud_verifier.verification.staging import Staging

TEXT = [(37 * i + 11) % 300 for i in range(60)]
START, PARENTS, PATH = 3, (-1, -1, 1, 0, 2, 4, 5, 6, 7), (1, 2, 4, 5, 6)
DRAFT = [250, *range(200, 208)]
KEPT = [*TEXT[:START], *(DRAFT[node] for node in PATH)]  # a block of 8


@pytest.fixture(params=["lean", "cuda", "cuda in fp8", "transformers"])
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> PagedBackend:
    """At once; with a forward; so, by the decoder of other models, as on CUDA."""
    backend = load_target(
        target_of("llama"),
        decoder=request.param.split()[0],
        kv_tokens=256,
        kv_dtype="fp8" if "fp8" in request.param else "auto",
        block_size=8,
        exact_rows="off",
    )
    if request.param == "transformers":
        backend.inputs = Staging(torch.device("cpu"))
    assert (backend.inputs is None) == (request.param == "lean")
    return backend


def kept_tree(backend: PagedBackend) -> PagedSequence:
    sequence = backend.new_sequence("a")
    backend.forward([ForwardItem(sequence, TEXT[:START], 0)])
    backend.forward([ForwardItem(sequence, DRAFT, 0, PARENTS)])
    backend.keep(sequence, START, PATH)
    return sequence


def step(backend: PagedBackend, *fed: tuple[PagedSequence, Sequence[int]]) -> Logits:
    """The last row of each."""
    return np.array(backend.forward([ForwardItem(sequence, ids, 1) for sequence, ids in fed]))


def expect(backend: PagedBackend, rows: Logits, *texts: Sequence[int]) -> None:
    """The rows are those after fresh prefills."""
    for row, text in zip(rows, texts, strict=True):
        sequence = backend.new_sequence()
        expected = step(backend, (sequence, text))[0]
        assert np.abs(row - expected).max() < 1e-4, text
        backend.close(sequence)
    backend.check_integrity()


def test_moved_tokens_are_found_in_the_prefix_cache_by_another_sequence(backend: PagedBackend) -> None:
    sequence = kept_tree(backend)
    backend.publish(sequence, KEPT)
    backend.close(sequence)
    other = backend.new_sequence("a", [*KEPT, 9])
    assert other.num_reused == len(KEPT)
    expect(backend, step(backend, (other, [9])), [*KEPT, 9])


def test_blocks_that_a_trees_sequence_gives_up_are_anothers_from_the_next_forward_on(
    backend: PagedBackend,
) -> None:
    """Those of the rejected nodes, and all where it is closed."""
    first, second = kept_tree(backend), kept_tree(backend)
    taken = set(second.table.block_ids)
    backend.close(second)
    new = backend.new_sequence()
    rows = step(backend, (new, TEXT), (first, [9]))
    assert taken & set(new.table.block_ids)
    expect(backend, rows, TEXT, [*KEPT, 9])


def test_a_block_is_copied_after_a_trees_tokens_moved_in_it(backend: PagedBackend) -> None:
    sequence = kept_tree(backend)
    twin = twin_of(backend, sequence, KEPT)
    for each in (sequence, twin):
        backend.truncate(each, len(KEPT) - 2)
    rows = step(backend, (twin, [7]), (sequence, [8]))
    expect(backend, rows, [*KEPT[:-2], 7], [*KEPT[:-2], 8])


def test_a_forward_that_fails_leaves_no_change_undone(
    backend: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves, and the copy of a block that its sequence has from then on."""
    sequence = kept_tree(backend)
    twin = twin_of(backend, sequence, KEPT)
    for each in (sequence, twin):
        backend.truncate(each, len(KEPT) - 2)

    def fail(*sequences: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(backend.planner, "plan", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            step(backend, (twin, [7]))
    backend.check_integrity()
    expect(backend, step(backend, (twin, [7]), (sequence, [8])), [*KEPT[:-2], 7], [*KEPT[:-2], 8])


def test_what_a_failed_forward_would_have_cleared_is_not() -> None:
    pools = [torch.ones(1, 3, 2, 1, 1), torch.ones(1, 3, 2, 1, 1)]
    changes = PoolChanges()
    changes.clear([1])
    changes.clear([2])
    changes.copy(BlockCopy(0, 1))
    changes.stage(torch.tensor)
    changes.make(pools)
    assert [pool[0, :, 0, 0, 0].tolist() for pool in pools] == [[1, 1, 0]] * 2
    changes.stage(torch.tensor)
    pools[0].fill_(5)
    changes.make(pools)
    assert pools[0].eq(5).all(), "once"


class ReplayingDecoder:
    """Leaves what is kept of a pass in one memory, as graphs do."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self._memory = decoder, dict[int, torch.Tensor]()
        self.writes_padding = decoder.writes_padding

    def __call__(self, token_ids: Any, positions: Any, rows: Any, plan: Any) -> torch.Tensor:
        logits: torch.Tensor = self._decoder(token_ids, positions, rows, plan)
        for layer, states in plan.features.items():
            plan.features[layer] = self._memory.setdefault(layer, states.clone()).copy_(states)
        return logits


def test_states_of_an_earlier_pass_are_kept_when_a_later_one_is_replayed(
    backend: PagedBackend,
) -> None:
    backend.feature_layers = (0, 2)
    step(backend, (backend.new_sequence(), TEXT[:16]))
    expected = backend.features
    backend.use_decoder(ReplayingDecoder(backend.decoder))  # type: ignore[arg-type]
    backend.row_plan = RowPlan((8,))
    step(backend, (backend.new_sequence(), TEXT[:16]))
    for layer, states in backend.features.items():
        assert (states - expected[layer]).abs().max() < 1e-4
