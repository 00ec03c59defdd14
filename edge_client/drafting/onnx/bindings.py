"""Binds numpy arrays to a graph's inputs and outputs, so that a run copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.spec import ATTENTION_BIAS, HIDDEN_STATES, POSITION_IDS, ROW_OUTPUTS, ROWS


class Bound:
    """Holds a numpy array and the OrtValue over the same memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        from onnxruntime import OrtValue

        self.array = array
        self.value = OrtValue.ortvalue_from_numpy(array)

    @property
    def is_shared(self) -> bool:
        """Returns whether onnxruntime uses the array itself and no copy."""
        return bool(self.value.data_ptr() == self.array.ctypes.data)


class IdInput:
    """Binds an input `[1, n]` or `[n]` of int64, whose n changes from run to run."""

    def __init__(self, binding: Any, name: str, *leading: int) -> None:
        self._binding = binding
        self._name = name
        self._leading = leading
        self._bound: dict[int, Bound] = {}  # by n
        self._num_bound = 0

    def bind(self, count: int) -> NDArray[np.int64]:
        """Binds `count` values and returns the array to write them to; it has those of its last run."""
        bound = self._bound.get(count)
        if bound is None:
            bound = self._bound[count] = Bound(np.zeros((*self._leading, count), np.int64))
        if count != self._num_bound:
            self._binding.bind_ortvalue_input(self._name, bound.value)
            self._num_bound = count
        array: NDArray[np.int64] = bound.array
        return array


class TreeInputs:
    """Binds what a graph for trees has beside a chain's inputs: positions, which slots each token sees, and the
    tokens whose rows are returned.

    The attention bias is as long as the KV buffers, not as the valid part of them, so that no shape changes from
    token to token: onnxruntime would plan its memory anew for each. It is 0 but during a run of nodes.
    """

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._positions = IdInput(binding, POSITION_IDS, 1)
        self._rows = IdInput(binding, ROWS)
        self._capacity = 0
        self._zeros = np.zeros(0, np.float32)
        self._biases: dict[int, Bound] = {}  # by n, all in the memory of `_zeros`
        self._num_bound = 0
        self._written = self._zeros  # the part of it that is not 0 during a run

    def set_capacity(self, capacity: int) -> None:
        """Sets the length of the KV buffers."""
        self._capacity = capacity
        self._zeros = np.zeros(0, np.float32)
        self._biases, self._num_bound = {}, 0

    def set_chain(self, num_tokens: int, num_past: int) -> None:
        """Prepares a run of tokens that follow each other, whose last row is returned."""
        self._bind_bias(num_tokens)
        self._rows.bind(1)[0] = num_tokens - 1
        positions = self._positions.bind(num_tokens)
        if num_tokens == 1:
            positions[0, 0] = num_past
        else:
            positions[0] = range(num_past, num_past + num_tokens)

    def set_nodes(self, positions: Sequence[int], bias: NDArray[np.float32], start: int) -> None:
        """Prepares a run of n nodes with `bias` [n, m] for the m slots from `start` on; all rows are returned.
        `clear` must follow."""
        num_nodes, num_slots = bias.shape
        self._written = self._bind_bias(num_nodes)[:, start : start + num_slots]
        self._written[:] = bias
        self._rows.bind(num_nodes)[:] = range(num_nodes)
        self._positions.bind(num_nodes)[0] = positions

    def clear(self) -> None:
        """Lets all slots be seen again."""
        self._written[:] = 0

    def check_integrity(self) -> None:
        """Asserts that all slots are seen, and that nothing was copied."""
        assert not self._zeros.any(), "a bias was not cleared"
        assert all(bound.is_shared for bound in self._biases.values()), "a bias was copied by onnxruntime"

    def _bind_bias(self, num_tokens: int) -> NDArray[np.float32]:
        """Returns [n, capacity], all 0."""
        bound = self._biases.get(num_tokens)
        if bound is None:
            size = num_tokens * self._capacity
            if size > self._zeros.size:
                self._zeros, self._biases = np.zeros(size, np.float32), {}
            view = self._zeros[:size].reshape(1, 1, num_tokens, self._capacity)
            bound = self._biases[num_tokens] = Bound(view)
            self._num_bound = 0
        if num_tokens != self._num_bound:
            self._binding.bind_ortvalue_input(ATTENTION_BIAS, bound.value)
            self._num_bound = num_tokens
        array: NDArray[np.float32] = bound.array[0, 0]
        return array


class RowOutputs:
    """Binds the outputs of k rows, whose k changes from run to run, to one memory; with a `hidden_size` also the states
    that the head reads."""

    def __init__(self, binding: Any, num_tokens: int, hidden_size: int = 0) -> None:
        self._binding = binding
        self._num_tokens, self._hidden_size = num_tokens, hidden_size
        self._names = (*ROW_OUTPUTS, HIDDEN_STATES) if hidden_size else ROW_OUTPUTS
        self._views: dict[int, tuple[Rows, tuple[Bound, ...]]] = {}  # by k
        self._buffers: list[NDArray[np.float32]] = []  # [most rows so far, num_tokens] each
        self._num_bound = 0

    def bind(self, num_rows: int) -> Rows:
        """Binds `num_rows` rows of each of `ROW_OUTPUTS` and returns the arrays."""
        if num_rows not in self._views:
            self._add_view(num_rows)
        rows, bounds = self._views[num_rows]
        if num_rows != self._num_bound:
            for name, bound in zip(self._names, bounds, strict=True):
                self._binding.bind_ortvalue_output(name, bound.value)
            self._num_bound = num_rows
        return rows

    def check_integrity(self) -> None:
        """Asserts that onnxruntime writes to our memory."""
        for _, bounds in self._views.values():
            assert all(bound.is_shared for bound in bounds), "outputs were copied by onnxruntime"

    def _add_view(self, num_rows: int) -> None:
        if not self._buffers or num_rows > len(self._buffers[0]):
            self._views, self._num_bound = {}, 0
            self._buffers = [np.zeros((num_rows, self._num_tokens), np.float32) for _ in ROW_OUTPUTS]
        logits, probs, tempered_logits, tempered_probs = (buffer[:num_rows] for buffer in self._buffers)
        bounds = tuple(map(Bound, (logits, probs, tempered_logits, tempered_probs)))
        hidden = None
        if self._hidden_size:
            hidden = np.zeros((num_rows, self._hidden_size), np.float32)
            bounds = (*bounds, Bound(hidden[None]))
        rows = Rows(logits, probs, tempered_logits, tempered_probs, hidden=hidden)
        self._views[num_rows] = rows, bounds
