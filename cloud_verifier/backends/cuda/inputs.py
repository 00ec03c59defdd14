"""The integers of a step on their way to the device: one copy, to memory that stays where it is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

FIRST_CAPACITY = 1 << 15  # integers; a forward of 512 rows takes about 2,000, and a block each
_ALIGNMENT = 4  # integers: 16 bytes, so that kernels are compiled for aligned addresses alone


class FixedInputs:
    """Collects integers on the host and copies them to the device together.

    What is added in the same order with the same lengths has the same addresses in every step, as a graph needs it,
    until a step wants more memory than any before.
    """

    def __init__(self, device: torch.device, capacity: int = FIRST_CAPACITY) -> None:
        self._device = device
        self._used = 0
        self._on_device = torch.empty(capacity, dtype=torch.int32, device=device)
        self._on_host: torch.Tensor | None = None  # of a step, from `start` to `send`

    @property
    def is_fixed(self) -> bool:
        """Returns whether all that was added since `start` has fixed addresses."""
        return self._used <= len(self._on_device)

    def start(self) -> None:
        """Begins a step. What earlier ones added is overwritten, on the device in the order of its work."""
        if not self.is_fixed:
            self._on_device = torch.empty(2 * self._used, dtype=torch.int32, device=self._device)
        self._used = 0
        # torch keeps pinned memory, and does not hand it out again before its copy is done.
        is_cuda = self._device.type == "cuda"
        self._on_host = torch.empty(len(self._on_device), dtype=torch.int32, pin_memory=is_cuda)

    def add(self, values: Sequence[int]) -> torch.Tensor:
        """Returns int32 [len(values)] on the device, which has the values from `send` on; outside of a step at once."""
        packed = values if isinstance(values, array) else array("i", values)
        if self._on_host is not None:
            begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            self._used = begin + len(packed)
            if self.is_fixed:
                self._on_host.numpy()[begin : self._used] = np.frombuffer(packed, np.int32)
                return self._on_device[begin : self._used]
        return torch.tensor(packed, dtype=torch.int32).to(self._device)

    def send(self) -> None:
        """Copies what was added, and ends the step; the host does not wait."""
        assert self._on_host is not None, "no step was begun"
        num_words = min(self._used, len(self._on_device))
        self._on_device[:num_words].copy_(self._on_host[:num_words], non_blocking=True)
        self._on_host = None
