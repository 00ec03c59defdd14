"""Runs one sequence through the shared network: holds its KV buffer, and tells each forward what it sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.pytorch.attention import Run
from outrider.edge_client.drafting.pytorch.kv import KvBuffer
from outrider.edge_client.drafting.pytorch.network import Network
from outrider.edge_client.drafting.rows.rows import Rows


class TorchRunner:
    """Implements `rows.kv_sequence.Runner`. Rows are computed on the device and come to the host in one copy."""

    takes_trees = True

    def __init__(self, network: Network, temperature: float) -> None:
        """`temperature` is that of the tempered rows; 0, where nothing reads them, counts as 1."""
        self._network = network
        self._kv = KvBuffer(network.max_context, network.has_fp8_kv)
        self._positions = np.arange(
            network.max_context
        )  # of what each slot holds; a slot's own, but in a tree
        self.set_temperature(temperature)

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature of the tempered rows; 0 counts as 1."""
        # A tensor, since torch divides by a number on some devices by multiplying with its reciprocal.
        value = None if temperature in (0.0, 1.0) else temperature
        self._temperature = None if value is None else torch.tensor(value, device=self._network.device)

    def set_seed(self, seed: int) -> None:
        """Does nothing: no run is random."""

    def free_scratch(self) -> None:
        """Does nothing: a run keeps no buffers."""

    @property
    def capacity(self) -> int:
        """Returns how many positions the KV buffer holds."""
        return self._kv.capacity

    @property
    def num_kv_bytes(self) -> int:
        """Returns the size of the KV buffer in bytes."""
        return self._kv.num_bytes

    def feed(self, token_ids: Sequence[int], num_past: int) -> Rows:
        """See `Runner.feed`."""
        stop = num_past + len(token_ids)
        return self._run(token_ids, range(num_past, stop), num_past, num_rows=1)

    def feed_nodes(
        self, token_ids: Sequence[int], position_ids: Sequence[int], bias: NDArray[np.float32], start: int
    ) -> Rows:
        """See `Runner.feed_nodes`."""
        num_nodes, num_slots = bias.shape
        first = start + num_slots - num_nodes
        return self._run(token_ids, position_ids, first, num_rows=num_nodes, visible=bias == 0)

    def move(self, slots: Sequence[int], start: int) -> None:
        """See `Runner.move`."""
        with torch.inference_mode():
            self._kv.move(slots, start)
        self._positions[start : start + len(slots)] = self._positions[list(slots)]

    def check_integrity(self) -> None:
        """Asserts that the layers' buffers agree with each other."""
        self._kv.check_integrity()

    def _run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        start: int,
        num_rows: int,
        visible: NDArray[np.bool_] | None = None,
    ) -> Rows:
        network, stop = self._network, start + len(token_ids)
        assert token_ids and stop <= network.max_context, f"{stop} positions do not fit"
        self._positions[start:stop] = positions
        run = Run(self._kv, start, positions, self._positions[:stop], network.device, visible)
        try:
            with torch.inference_mode():
                self._kv.reserve(stop)
                return self._rows(network(list(token_ids), list(positions), run, num_rows))
        except RuntimeError as error:  # of torch: too little memory, or a device that is gone
            raise ModelError(f"the draft failed to run: {str(error).splitlines()[0]}") from error

    def _rows(self, logits: torch.Tensor) -> Rows:
        parts = [logits, logits.softmax(-1)]
        if self._temperature is not None:
            parts.append(logits / self._temperature)
            parts.append(parts[-1].softmax(-1))
        arrays = torch.stack(parts).cpu().numpy()
        return Rows(arrays[0], arrays[1], arrays[-2], arrays[-1])
