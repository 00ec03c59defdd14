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
from outrider.edge_client.drafting.onnx.dropout import Candidates, DropoutPlan, fill_masks, top_variance
from outrider.edge_client.drafting.spec import (
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DROPOUT_MASKS,
    ROW_OUTPUTS,
    DraftSpec,
)

FIRST_CAPACITY = 512  # positions; doubles until the draft's context, by copying


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds the graph's outputs for the next token, each float32 `[1, num_tokens]`."""

    logits: NDArray[np.float32]
    probs: NDArray[np.float32]  # softmax(logits)
    tempered_logits: NDArray[np.float32]  # logits / temperature
    tempered_probs: NDArray[np.float32]  # softmax(tempered_logits)
    candidates: Candidates | None = None  # under dropout, where the variant of the graph runs


class OnnxRunner:
    """Feeds tokens. Each KV buffer `[1, kv_heads, capacity, head_dim]` is bound as past and present, which
    onnxruntime recognises by the pointer and then updates in place. Each call states how much of it is valid,
    so rollback is a smaller number."""

    def __init__(
        self, session: Any, spec: DraftSpec, temperature: float, dropout: DropoutPlan | None = None
    ) -> None:
        """`temperature` is that of the tempered rows; 0, where nothing reads them, counts as 1. `dropout` is
        the plan of a session over the variant for it, and None over the plain graph."""
        self._session = session
        self._spec = spec
        self._binding = session.io_binding()
        self._bound: dict[str, _Bound] = {}
        self._input_ids: dict[int, _Bound] = {}  # by number of tokens
        self._seqlens = self._bind_input("seqlens_k", np.int32)
        self._total = self._bind_input("total_sequence_length", np.int32)
        self._temperature = self._bind_input("temperature", np.float32)
        self.set_temperature(temperature)
        row_shape = (1, spec.num_tokens)
        rows = [self._bind_output(name, row_shape, np.float32) for name in ROW_OUTPUTS]
        self._outputs = rows
        self._dropout = dropout
        self._masks: _Bound | None = None
        self._seed = 0
        candidates = None if dropout is None else self._bind_dropout(dropout)
        logits, probs, tempered_logits, tempered_probs = (bound.array for bound in rows)
        self._output = Rows(logits, probs, tempered_logits, tempered_probs, candidates)
        self._kv: dict[str, _Bound] = {}
        self._num_bound_ids = 0
        self._capacity = 0

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature of the tempered rows; 0 counts as 1."""
        self._temperature.array[0] = temperature or 1.0

    def set_seed(self, seed: int) -> None:
        """Sets the seed of the masks, where there are any."""
        self._seed = seed

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
        total = num_past + len(token_ids)
        assert token_ids and total <= self._spec.max_context, f"{total} positions do not fit"
        if total > self._capacity:
            self._grow(total, num_past)
        self._bind_ids(token_ids)
        self._seqlens.array[0] = total - 1  # anything else is silently wrong
        self._total.array[0] = total
        if self._masks is not None and self._dropout is not None:
            fill_masks(self._masks.array, self._dropout.rate, self._seed, total)
        self._run()
        return self._output

    def run_again(self) -> None:
        """Repeats the last run alone (benchmarks)."""
        self._run()

    def check_integrity(self) -> None:
        """Asserts that buffers have one capacity and were not copied by onnxruntime."""
        for name, bound in self._kv.items():
            assert bound.array.shape[2] == self._capacity, f"{name} has another capacity"
            assert bound.is_shared, f"{name} was copied by onnxruntime"
        assert all(bound.is_shared for bound in self._outputs), "outputs were copied by onnxruntime"
        assert self._total.is_shared and self._seqlens.is_shared, "inputs were copied by onnxruntime"

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions have no base of their own
            raise ModelError(f"the draft failed to run: {str(error).splitlines()[0]}") from error

    def _bind_input(self, name: str, dtype: type[np.generic]) -> _Bound:
        bound = _Bound(np.zeros(1, dtype))
        self._binding.bind_ortvalue_input(name, bound.value)
        return bound

    def _bind_output(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> _Bound:
        bound = _Bound(np.zeros(shape, dtype))
        self._binding.bind_ortvalue_output(name, bound.value)
        return bound

    def _bind_dropout(self, plan: DropoutPlan) -> Candidates:
        self._masks = _Bound(np.ones((plan.num_samples, 1, plan.width), np.float32))
        self._binding.bind_ortvalue_input(DROPOUT_MASKS, self._masks.value)
        ids = self._bind_output(CANDIDATE_IDS, (plan.num_candidates,), np.int64)
        shape = (plan.num_samples, plan.num_candidates)
        logits = self._bind_output(CANDIDATE_LOGITS, shape, np.float32)
        self._outputs = [*self._outputs, ids, logits]
        return Candidates(ids.array, logits.array)

    def _bind_ids(self, token_ids: Sequence[int]) -> None:
        num_ids = len(token_ids)
        bound = self._input_ids.get(num_ids)
        if bound is None:
            bound = self._input_ids[num_ids] = _Bound(np.zeros((1, num_ids), np.int64))
        if num_ids != self._num_bound_ids:
            self._binding.bind_ortvalue_input("input_ids", bound.value)
            self._num_bound_ids = num_ids
        bound.array[0] = token_ids

    def _grow(self, needed: int, num_past: int) -> None:
        capacity = max(self._capacity, FIRST_CAPACITY)
        while capacity < needed:
            capacity *= 2
        self._capacity = min(capacity, self._spec.max_context)
        shape = (1, self._spec.num_kv_heads, self._capacity, self._spec.head_dim)
        for layer in range(self._spec.num_layers):
            for kind in ("key", "value"):
                name = f"{kind}_{layer}"
                bound = _Bound(np.zeros(shape, np.float32))
                if num_past:
                    bound.array[:, :, :num_past] = self._kv[name].array[:, :, :num_past]
                self._kv[name] = bound
                self._binding.bind_ortvalue_input(f"past_{name}", bound.value)
                self._binding.bind_ortvalue_output(f"present_{name}", bound.value)


class _Bound:
    """Holds a numpy array and the OrtValue over the same memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        from onnxruntime import OrtValue

        self.array = array
        self.value = OrtValue.ortvalue_from_numpy(array)

    @property
    def is_shared(self) -> bool:
        return bool(self.value.data_ptr() == self.array.ctypes.data)


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
