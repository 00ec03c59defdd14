"""Runs one sequence through the shared graph: holds its KV buffers and its bound inputs and outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.onnx.bindings import Bound, IdInput, RowOutputs, TreeInputs
from outrider.edge_client.drafting.rows.dropout import Candidates, DropoutPlan, fill_masks, top_variance
from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.spec import CANDIDATE_IDS, CANDIDATE_LOGITS, DROPOUT_MASKS, DraftSpec

FIRST_CAPACITY = 512  # positions; doubles until the draft's context, by copying


class OnnxRunner:
    """Feeds tokens. Each KV buffer `[1, kv_heads, capacity, head_dim]` is bound as past and present, which
    onnxruntime recognises by the pointer and then updates in place. Each call states how much of it is valid,
    so rollback is a smaller number."""

    def __init__(
        self,
        session: Any,
        spec: DraftSpec,
        temperature: float,
        dropout: DropoutPlan | None = None,
        has_hidden: bool = False,
    ) -> None:
        """`temperature` is that of the tempered rows; 0, where nothing reads them, counts as 1. `dropout` is
        the plan of a session over the variant for it, and None over the plain graph. `has_hidden`: rows have the states
        that the head reads."""
        self._session = session
        self._spec = spec
        self._dropout_plan, self._has_hidden = dropout, has_hidden
        self._kv: dict[str, Bound] = {}
        self._capacity = 0
        self.free_scratch()
        self.set_temperature(temperature)

    def free_scratch(self) -> None:
        """See `Runner.free_scratch`. The binding refers to its buffers for as long as it lives."""
        self._binding = self._session.io_binding()
        self._input_ids = IdInput(self._binding, "input_ids", 1)
        self._seqlens = self._bind_input("seqlens_k", np.int32)
        self._total = self._bind_input("total_sequence_length", np.int32)
        self._temperature = self._bind_input("temperature", np.float32)
        self.set_temperature(1.0)
        self._tree = TreeInputs(self._binding) if self._spec.takes_trees else None
        if self._tree:
            self._tree.set_capacity(self._capacity)
        hidden_size = self._spec.hidden_size if self._has_hidden else 0
        self._rows = RowOutputs(self._binding, self._spec.num_tokens, hidden_size)
        self._dropout = _Dropout(self._binding, self._dropout_plan) if self._dropout_plan else None
        for name in self._kv:
            self._bind_kv(name)

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature of the tempered rows; 0 counts as 1."""
        self._temperature.array[0] = temperature or 1.0

    def set_seed(self, seed: int) -> None:
        """Sets the seed of the masks, where there are any."""
        if self._dropout:
            self._dropout.seed = seed

    @property
    def takes_trees(self) -> bool:
        """Returns whether `feed_nodes` is possible."""
        return self._tree is not None

    @property
    def capacity(self) -> int:
        """Returns how many positions the KV buffers hold."""
        return self._capacity

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV buffers in bytes."""
        return sum(bound.array.nbytes for bound in self._kv.values())

    def feed(self, token_ids: Sequence[int], num_past: int) -> Rows:
        """Runs `token_ids` after the first `num_past` positions and returns the rows after the last.

        The next call overwrites the arrays. Raises `ModelError` where the runtime fails.
        """
        self._begin(token_ids, num_past)
        if self._tree:
            self._tree.set_chain(len(token_ids), num_past)
        rows = self._rows.bind(1)
        if self._dropout:
            rows = replace(rows, candidates=self._dropout.vary(num_past + len(token_ids)))
        self._run()
        return rows

    def feed_nodes(
        self, token_ids: Sequence[int], position_ids: Sequence[int], bias: NDArray[np.float32], start: int
    ) -> Rows:
        """Runs n nodes of a tree into the last n of the m slots from `start` on; returns a row after each.

        `bias` [n, m] is `spec.HIDDEN` where a node does not see a slot, else 0; no node sees a slot after its own,
        and each sees those before `start`. Slots may outnumber positions, but not the draft's context. The next
        call overwrites the arrays; there are no candidates. Raises `ModelError` where the runtime fails.
        """
        assert self._tree is not None, "the draft's graph takes no trees"
        self._begin(token_ids, start + bias.shape[1] - len(token_ids))
        self._tree.set_nodes(position_ids, bias, start)
        if self._dropout:
            self._dropout.leave_out()
        rows = self._rows.bind(len(token_ids))
        try:
            self._run()
        finally:
            self._tree.clear()
        return rows

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copies the KV of rising `slots` to those from `start` on."""
        stop = start + len(slots)
        if list(slots) != list(range(start, stop)):
            for bound in self._kv.values():
                bound.array[:, :, start:stop] = bound.array[:, :, slots]

    def run_again(self) -> None:
        """Repeats the last run alone (benchmarks)."""
        self._run()

    def check_integrity(self) -> None:
        """Asserts that buffers have one capacity and were not copied by onnxruntime."""
        for name, bound in self._kv.items():
            assert bound.array.shape[2] == self._capacity, f"{name} has another capacity"
            assert bound.is_shared, f"{name} was copied by onnxruntime"
        self._rows.check_integrity()
        if self._tree:
            self._tree.check_integrity()
        assert self._total.is_shared and self._seqlens.is_shared, "inputs were copied by onnxruntime"

    def _begin(self, token_ids: Sequence[int], num_past: int) -> None:
        total = num_past + len(token_ids)
        assert token_ids and total <= self._spec.max_context, f"{total} positions do not fit"
        if total > self._capacity:
            self._grow(total, num_past)
        self._input_ids.bind(len(token_ids))[0] = token_ids
        self._seqlens.array[0] = total - 1  # anything else is silently wrong
        self._total.array[0] = self._capacity if self._tree else total  # of the bias

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions have no base of their own
            raise ModelError(f"the draft failed to run: {str(error).splitlines()[0]}") from error

    def _bind_input(self, name: str, dtype: type[np.generic]) -> Bound:
        bound = Bound(np.zeros(1, dtype))
        self._binding.bind_ortvalue_input(name, bound.value)
        return bound

    def _grow(self, needed: int, num_past: int) -> None:
        capacity = max(self._capacity, FIRST_CAPACITY)
        while capacity < needed:
            capacity *= 2
        self._capacity = min(capacity, self._spec.max_context)
        if self._tree:
            self._tree.set_capacity(self._capacity)
        shape = (1, self._spec.num_kv_heads, self._capacity, self._spec.head_dim)
        for layer in range(self._spec.num_layers):
            for kind in ("key", "value"):
                name = f"{kind}_{layer}"
                bound = Bound(np.zeros(shape, np.float32))
                if num_past:
                    bound.array[:, :, :num_past] = self._kv[name].array[:, :, :num_past]
                self._kv[name] = bound
                self._bind_kv(name)

    def _bind_kv(self, name: str) -> None:
        value = self._kv[name].value
        self._binding.bind_ortvalue_input(f"past_{name}", value)
        self._binding.bind_ortvalue_output(f"present_{name}", value)


class _Dropout:
    """Binds what the variant for MC dropout has beside the plain graph."""

    def __init__(self, binding: Any, plan: DropoutPlan) -> None:
        self._binding = binding
        self._rate = plan.rate
        self._bound = _bind_shapes(plan.num_samples, plan.num_candidates, plan.width)
        self._none = _bind_shapes(0, 0, plan.width)  # its branch then does nothing
        self._is_bound: bool | None = None  # to `_bound`
        self.seed = 0

    def vary(self, position: int) -> Candidates:
        """Prepares a run with the masks of a position; returns where its candidates will be."""
        self._bind(True)
        masks, ids, logits = (bound.array for bound in self._bound)
        fill_masks(masks, self._rate, self.seed, position)
        return Candidates(ids, logits)

    def leave_out(self) -> None:
        """Prepares a run without masks."""
        self._bind(False)

    def _bind(self, has_masks: bool) -> None:
        if has_masks == self._is_bound:
            return
        masks, ids, logits = self._bound if has_masks else self._none
        self._binding.bind_ortvalue_input(DROPOUT_MASKS, masks.value)
        self._binding.bind_ortvalue_output(CANDIDATE_IDS, ids.value)
        self._binding.bind_ortvalue_output(CANDIDATE_LOGITS, logits.value)
        self._is_bound = has_masks


def _bind_shapes(num_samples: int, num_candidates: int, width: int) -> tuple[Bound, Bound, Bound]:
    return (
        Bound(np.ones((num_samples, 1, width), np.float32)),
        Bound(np.zeros(num_candidates, np.int64)),
        Bound(np.zeros((num_samples, num_candidates), np.float32)),
    )


_NUM_WARM, _NUM_TIMED = 2, 7


@dataclass(frozen=True, slots=True)
class DropoutCost:
    """Holds medians of a few steps at the beginning of a sequence, with masks and without in turn."""

    plain_ms: float
    extra_ms: float  # masks, branch and variance

    @property
    def ratio(self) -> float:
        """Returns a step's time with dropout over one without."""
        return (self.plain_ms + self.extra_ms) / self.plain_ms


def measure_cost(session: Any, spec: DraftSpec, plan: DropoutPlan) -> DropoutCost:
    """Returns the cost; `session` runs the variant. Without masks its branch does nothing, which measures the
    plain draft."""
    varied = OnnxRunner(session, spec, 1.0, plan)
    plain = OnnxRunner(session, spec, 1.0, replace(plan, num_samples=0, num_candidates=0))
    plain_ms, extra_ms = [], []
    for _ in range(_NUM_WARM + _NUM_TIMED):
        start_s = time.perf_counter()
        plain.feed([0], 0)
        middle_s = time.perf_counter()
        rows = varied.feed([0], 0)
        assert rows.candidates is not None
        top_variance(rows.candidates)
        end_s = time.perf_counter()
        plain_ms.append((middle_s - start_s) * 1e3)
        extra_ms.append((end_s - middle_s - (middle_s - start_s)) * 1e3)
    return DropoutCost(*(statistics.median(each[_NUM_WARM:]) for each in (plain_ms, extra_ms)))
