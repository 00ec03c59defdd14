"""Steps that are replayed: when, with whose numbers, and what becomes of those that cannot be."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.cloud_verifier.backends.attention.plan import AttentionRule, ForwardPlan
from outrider.cloud_verifier.backends.cuda import graphs
from outrider.cloud_verifier.backends.cuda.graphs import CudaCapture, Run, StepGraphs, graph_rows
from outrider.cloud_verifier.verification.staging import Staging
from outrider.kernels.kv_pool import KVPool

CPU = torch.device("cpu")
POOL = torch.zeros(1)


class Attention:
    """Says what a graph of it would have in it."""

    def __init__(self, fixed: tuple[int, ...] | None) -> None:
        self.fixed = fixed

    def __call__(self, *tensors: object) -> torch.Tensor:
        raise AssertionError("no layer is run here")

    def again(self) -> Attention:
        return Attention(self.fixed)


@dataclass
class Steps:
    """Doubles token ids, as layers, and counts how."""

    inputs: Staging = field(default_factory=lambda: Staging(CPU, 256))
    num_runs: int = 0
    num_replays: int = 0
    num_captures: int = 0
    feature_layers: tuple[int, ...] = ()

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan) -> torch.Tensor:
        self.num_runs += 1
        plan.rules_seen[0] = AttentionRule(window=7)
        plan.features.update({layer: layer * token_ids for layer in plan.feature_layers})
        return 2 * token_ids

    def capture(self, run: Run) -> Run:
        self.num_captures += 1
        out = run()
        self.num_runs -= 1

        def replay() -> torch.Tensor:
            self.num_replays += 1
            out.copy_(run())
            self.num_runs -= 1
            return out

        return replay

    def step(self, through: StepGraphs, token_ids: list[int], *fixed: int) -> list[int]:
        """Runs a step as a backend does."""
        self.inputs.start()
        ids, positions, slots = (self.inputs.add(np.array(token_ids, np.int32)) for _ in range(3))
        attention = Attention(fixed or None)
        plan = ForwardPlan(
            [KVPool(POOL)], [KVPool(POOL)], slots, attention, len(token_ids), self.inputs.is_fixed
        )
        plan.feature_layers = self.feature_layers
        self.inputs.send()
        found = through(ids, positions, plan).tolist()
        features = {layer: each.tolist() for layer, each in plan.features.items()}
        assert features == {layer: [layer * each for each in token_ids] for layer in self.feature_layers}
        assert plan.rules_seen == {0: AttentionRule(window=7)}, "a replayed step attends by the same rules"
        return found


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def through(steps: Steps) -> StepGraphs:
    return StepGraphs(steps.run, steps.capture)


def test_the_third_step_of_a_size_is_replayed_with_its_own_numbers(steps: Steps, through: StepGraphs) -> None:
    for number in range(5):
        assert steps.step(through, [number, 3, 9], 4) == [2 * number, 6, 18]
    assert (steps.num_runs, steps.num_captures, steps.num_replays) == (2, 1, 3)


def test_other_rows_grids_and_addresses_have_graphs_of_their_own(steps: Steps, through: StepGraphs) -> None:
    for number in range(3):
        for token_ids, grid in (([number, 1], 4), ([number, 1, 2], 4), ([number, 1], 8)):
            assert steps.step(through, token_ids, grid) == [2 * each for each in token_ids]
    assert steps.num_captures == steps.num_replays == through.num_graphs == 3
    steps.inputs = Staging(CPU, 256)
    assert steps.step(through, [5, 6], 4) == [10, 12] and steps.num_replays == 3


def test_states_that_are_kept_are_those_of_the_step(steps: Steps, through: StepGraphs) -> None:
    """Heads ask for them after the first steps, those of the check at load."""
    for steps.feature_layers in ((), (2, 5)):
        for number in range(4):
            steps.step(through, [number, 3], 4)
    assert (steps.num_captures, steps.num_replays) == (2, 4)


def test_what_no_graph_is_right_for_is_run(
    steps: Steps, through: StepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in several launches; rows past the most; inputs that found no room in fixed memory."""
    monkeypatch.setattr(graphs, "MAX_ROWS", 4)
    for _ in range(3):
        steps.step(through, [1, 2])
        steps.step(through, [1, 2, 3, 4, 5], 4)
    for length in (100, 300, 900):
        steps.inputs.start()
        steps.inputs.add(np.arange(length))
        assert not steps.inputs.is_fixed
        plan = ForwardPlan([KVPool(POOL)], [KVPool(POOL)], POOL, Attention((4,)), 2, steps.inputs.is_fixed)
        steps.inputs.send()
        through(POOL, POOL, plan)
    assert (steps.num_runs, steps.num_captures) == (9, 0)


def test_where_nothing_can_be_captured_steps_run_and_one_line_is_logged(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    through = StepGraphs(steps.run, capture)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        for number in range(5):
            assert steps.step(through, [number, 3], 4 + number // 3) == [2 * number, 6]
    assert steps.num_runs == 5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "operation not permitted" in record.getMessage()


def test_a_graph_keeps_nothing_of_the_attention_that_it_was_captured_of(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has up to 235 MB between its launches: all graphs compute in the same memory."""
    captured: list[weakref.ref[Attention]] = []

    def again(attention: Attention) -> Attention:
        other = Attention(attention.fixed)
        captured.append(weakref.ref(other))
        return other

    def capture(run: Run) -> Run:
        out = run()
        return lambda: out

    monkeypatch.setattr(Attention, "again", again)
    through = StepGraphs(steps.run, capture)
    for grid in (4, 8):
        for _ in range(3):
            steps.step(through, [5, 3], grid)
    gc.collect()
    assert through.num_graphs == 2 and [each() for each in captured] == [None, None]


class FakeCuda:
    """Stands in for what torch.cuda captures and allocates. A pool ends with its last graph, and torch's allocator
    raises an error for a graph that is begun in such a pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_cached = self.num_taken = 0  # bytes
        self.num_pools = 0
        self.ended: set[tuple[int, int]] = set()
        self.graphs: dict[tuple[int, int], int] = {}

        class Graph:
            def replay(self) -> None: ...

        cuda = {
            "graph_pool_handle": self._new_pool,
            "memory_reserved": lambda _: self.num_cached + self.num_taken,
            "empty_cache": self._empty_cache,
            "CUDAGraph": Graph,
            "graph": self._capturing,
            "device": lambda _: contextlib.nullcontext(),
        }
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def run(self) -> torch.Tensor:
        self.num_taken += 30 * 2**20
        return POOL

    def _new_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    def _empty_cache(self) -> None:
        self.num_cached = 0

    @contextlib.contextmanager
    def _capturing(self, graph: object, pool: tuple[int, int], **_: object) -> Iterator[None]:
        assert pool not in self.ended, "use_count > 0"
        self.graphs[pool] = self.graphs.get(pool, 0) + 1
        weakref.finalize(graph, self._drop, pool)
        torch.cuda.empty_cache()
        yield

    def _drop(self, pool: tuple[int, int]) -> None:
        self.graphs[pool] -= 1
        if not self.graphs[pool]:
            self.ended.add(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_the_memory_of_graphs_is_what_they_take_beside_the_allocators_cache(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture begins by giving the cache back."""
    capture = CudaCapture(torch.device("cuda"))
    with caplog.at_level(logging.INFO, logger="outrider"):
        replays = []
        for _ in range(2):
            cuda.num_cached = 700 * 2**20
            replays.append(capture(cuda.run))
            assert replays[-1]() is POOL
    assert [record.getMessage().rpartition(" in ")[2] for record in caplog.records] == ["30 MiB", "60 MiB"]


def test_graphs_share_a_pool_until_all_were_dropped(cuda: FakeCuda) -> None:
    """As they are each time when another way to multiply is tried at the start."""
    capture = CudaCapture(torch.device("cuda"))
    replays = [capture(cuda.run) for _ in range(2)]
    replays.pop()
    replays.append(capture(cuda.run))
    assert cuda.num_pools == 1
    replays.clear()
    replays.append(capture(cuda.run))
    assert cuda.num_pools == 2 and len(cuda.ended) == 1


def test_the_graph_that_was_used_longest_ago_goes_first(
    steps: Steps, through: StepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    for grid in (1, 1, 2, 2, 1, 3, 3, 1):
        steps.step(through, [1], grid)
    assert (steps.num_captures, steps.num_replays) == (3, 2)
    steps.step(through, [1], 2)
    assert steps.num_replays == 2, "2 was dropped for 3"


def test_what_was_captured_of_other_products_is_not_replayed(steps: Steps, through: StepGraphs) -> None:
    for number in range(3):
        steps.step(through, [number], 4)
    through.forget()
    steps.step(through, [7], 4)
    assert (steps.num_runs, steps.num_replays) == (3, 1)


def test_few_numbers_of_rows_are_run() -> None:
    padded = {graph_rows(num_rows) for num_rows in range(1, 513)}
    assert padded == {8, 16, 32, 64, 128, 256, 384, 512}
    assert graph_rows(513) == 513 and graph_rows(9) == 16
