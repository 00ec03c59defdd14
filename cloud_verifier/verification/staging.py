"""A step's small inputs to the device in one copy, and its results back in one: neither waits for the device.

Both go through pinned memory, which torch keeps and does not hand out again before its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes: of each array in the one that is copied


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Returns the arrays on the device: views of one tensor, which is copied while the host goes on."""
    ends, num_bytes = [], 0
    for array in arrays:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT + array.nbytes
        ends.append(num_bytes)
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=_is_cuda(device))
    values = packed.numpy()
    for array, end in zip(arrays, ends, strict=True):
        values[end - array.nbytes : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = packed.to(device, non_blocking=True)
    return [
        copied[end - array.nbytes : end].view(_TORCH[array.dtype]).view(array.shape)
        for array, end in zip(arrays, ends, strict=True)
    ]


_TORCH = {
    np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")
}  # what a step uploads


class Download:
    """Holds results of a step that are on their way to the host."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        """Starts the copy of `results`, which come as float64: ids below 2^53 are exact."""
        self._shapes = [each.shape for each in results]
        packed = torch.cat([each.reshape(-1).double() for each in results])
        is_cuda = _is_cuda(packed.device)
        self._values = torch.empty(len(packed), dtype=torch.float64, pin_memory=is_cuda)
        self._values.copy_(packed, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if is_cuda:
            with torch.cuda.device_of(packed):  # type: ignore[no-untyped-call]
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    @property
    def is_computed(self) -> bool:
        """Returns whether the results are there."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the results are there."""
        if self._event is not None:
            self._event.synchronize()

    @cached_property
    def arrays(self) -> list[NDArray[np.float64]]:
        """Returns the results; waits for them."""
        self.wait()
        values, arrays = self._values.numpy(), list[NDArray[np.float64]]()
        for shape in self._shapes:
            arrays.append(values[: shape.numel()].reshape(shape))
            values = values[shape.numel() :]
        return arrays


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
