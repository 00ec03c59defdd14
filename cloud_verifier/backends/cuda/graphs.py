"""The layers of a step as a CUDA graph: all their launches as one, once the same sizes have come twice.

A graph has grids and addresses in it, no numbers: tokens, positions, slots and lengths are read on the device, from
memory that stays where it is (`verification.staging`). So steps are padded to few numbers of rows, and there is a graph
for each of these, for each grid of the attention, and for the addresses.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.cloud_verifier.backends.attention.plan import AttentionRule, FixedAttention, ForwardPlan

logger = logging.getLogger(__name__)

MIN_ROWS, MAX_ROWS = 8, 512  # of a graph; the device takes longer for more than the host for their launches
# An H100 computes up to 256 rows in the time in which it reads a 7B model's weights; more rows cost time.
FREE_ROWS, ROWS_STEP = 256, 128
MAX_GRAPHS = 64

RunLayers = Callable[[torch.Tensor, torch.Tensor, ForwardPlan], torch.Tensor]
Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]  # returns what runs it again, in the same memory


def graph_rows(num_rows: int) -> int:
    """Returns the rows with which a step of `num_rows` is run: few sizes, and as many as there are above those of a
    graph."""
    if num_rows > MAX_ROWS:
        return num_rows
    if num_rows > FREE_ROWS:
        return -(-num_rows // ROWS_STEP) * ROWS_STEP
    return max(MIN_ROWS, 1 << (num_rows - 1).bit_length())


@dataclass(slots=True)
class Graph:
    """Holds the captured layers of steps of one size."""

    replay: Run
    # Of the run that was captured. Its plan is not kept: the memory of its attention is free for other graphs.
    rules_seen: dict[int, AttentionRule]
    features: dict[int, torch.Tensor]


class StepGraphs:
    """Runs the layers of steps, and replays those of sizes that come again."""

    def __init__(self, run: RunLayers, capture: Capture) -> None:
        self._run = run
        self._capture: Capture | None = capture
        # The last used is the last; None: of sizes that came once.
        self._graphs: dict[tuple[int, ...], Graph | None] = {}

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan) -> torch.Tensor:
        """Returns what `run` does. The next call may overwrite it."""
        key = _key(token_ids, positions, plan)
        if key is None or self._capture is None:
            return self._run(token_ids, positions, plan)
        if (graph := self._graphs.get(key)) is not None:
            self._keep(key, graph)
            states = graph.replay()
            plan.rules_seen.update(graph.rules_seen)
            plan.features.update(graph.features)  # until the next replay
            return states
        states = self._run(token_ids, positions, plan)
        if key in self._graphs:
            graph = self._make(self._capture, token_ids, positions, plan)
        self._keep(key, graph)
        return states

    @property
    def num_graphs(self) -> int:
        """Returns the number of sizes that are replayed."""
        return sum(map(bool, self._graphs.values()))

    def forget(self) -> None:
        """Drops all graphs: what they were captured of is computed in another way from now on."""
        self._graphs.clear()

    def _make(
        self, capture: Capture, token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan
    ) -> Graph | None:
        """Returns the graph; None, from now on too, where there can be none."""
        assert isinstance(plan.attention, FixedAttention)
        again = replace(plan, attention=plan.attention.again(), rules_seen={}, features={})

        def run() -> torch.Tensor:
            again.rules_seen.clear()
            return self._run(token_ids, positions, again)

        try:
            return Graph(capture(run), again.rules_seen, again.features)
        except RuntimeError as error:  # no memory is left, or a library does what cannot be captured
            self._capture = None
            self.forget()
            logger.warning("steps are not run as CUDA graphs, which takes longer: %s", error)
            return None

    def _keep(self, key: tuple[int, ...], graph: Graph | None) -> None:
        self._graphs.pop(key, None)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]


def _key(token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan) -> tuple[int, ...] | None:
    """Returns all that a graph has in it; None where that changes with every step, or rows are too many."""
    num_rows = len(token_ids)
    # Asked for by name: whether an attention has all of `FixedAttention` takes as long as the rest of this.
    of_attention: tuple[int, ...] | None = getattr(plan.attention, "fixed", None)
    if not plan.is_fixed or num_rows > MAX_ROWS or of_attention is None:
        return None
    tensors = token_ids, positions, plan.write, plan.key_pools[0].rows, plan.value_pools[0].rows
    kept = len(plan.feature_layers), *plan.feature_layers
    return num_rows, *kept, *of_attention, *(each.data_ptr() for each in tensors)


class CudaCapture:
    """Captures what a device is given to do. All graphs share the memory in which they compute: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle
        self._living: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # that compute in the pool
        self._num_graphs = self._num_bytes = 0

    def __call__(self, run: Run) -> Run:
        """Returns what replays `run`. Raises RuntimeError where it cannot be captured."""
        start_s = time.perf_counter()
        torch.cuda.empty_cache()  # as a capture does first: the memory that goes then is no graph's
        before = torch.cuda.memory_reserved(self._device)
        if not self._living:  # a pool ends with its last graph, and no other may begin in it
            self._pool, self._num_bytes = torch.cuda.graph_pool_handle(), 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()
        self._living.add(graph)
        self._num_bytes += torch.cuda.memory_reserved(self._device) - before
        self._num_graphs += 1
        seconds, num_mib = time.perf_counter() - start_s, self._num_bytes // 2**20
        logger.info("CUDA graph %d in %.2f s; all compute in %d MiB", self._num_graphs, seconds, num_mib)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay
