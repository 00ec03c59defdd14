"""A step's small arrays to the device in one copy, and its results back in one: neither waits for the device.

Both go through pinned memory, which torch keeps and does not hand out again before its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FIRST_CAPACITY = 1 << 20  # bytes; a forward of 512 rows takes about 8 KiB, and 4 bytes for each block
MAX_VIEWS = 1 << 12  # of the device's memory that are kept: to make one takes torch longer than a copy
_ALIGNMENT = 16  # bytes, of each array's address: kernels are compiled for aligned addresses alone
_PASS_ALIGNMENT = 1 << 14  # bytes, more than the inputs of most passes
_TORCH = {
    np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")
}  # what a step uploads


class Staging:
    """Collects arrays on the host, and copies them to the device together.

    What is added in the same order with the same sizes has the same addresses in every step, as a graph needs it,
    until a step wants more memory than any before it: the rest of that one step is a copy of its own.
    """

    def __init__(self, device: torch.device, capacity: int = FIRST_CAPACITY) -> None:
        """`capacity` is in bytes."""
        self._device = device
        self._memory = _Memory(torch.empty(capacity, dtype=torch.uint8, device=device))
        self._parts: list[_Part] = []  # of a step, from `start` to `send`
        self._waiting: Attached | None = None

    @property
    def is_fixed(self) -> bool:
        """Returns whether all that was added since `start` has fixed addresses."""
        return len(self._parts) == 1

    def start(self) -> None:
        """Begins a step. What earlier ones added is overwritten, on the device in the order of its work."""
        self._parts = [_Part(self._memory)]

    def start_pass(self) -> None:
        """Leaves room, so that the addresses of a further pass do not follow from the sizes of the one before it."""
        self._parts[-1].align(_PASS_ALIGNMENT)

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        """Returns the array on the device, which has its values from `send` on; outside of a step at once."""
        if not self._parts:
            return torch.tensor(array, device=self._device)
        if not self._parts[-1].has_room(array.nbytes):
            num_bytes = max(2 * sum(part.capacity for part in self._parts), array.nbytes)
            self._parts.append(_Part(self._new_memory(num_bytes)))
        return self._parts[-1].add(array)

    def attach(self, arrays: Sequence[NDArray[Any]]) -> Attached:
        """Returns the arrays, which go with those of the next step, after them; they take the place of arrays that were
        attached before and not sent."""
        self._waiting = Attached(arrays)
        return self._waiting

    def send(self) -> None:
        """Copies what was added and attached, and ends the step; the host does not wait."""
        assert self._parts, "no step was begun"
        if self._waiting is not None:
            self._waiting.tensors = [self.add(array) for array in self._waiting.arrays]
            self._waiting = None
        for part in self._parts:
            part.send()
        if not self.is_fixed:
            num_bytes = 2 * sum(part.num_used for part in self._parts)
            self._memory = self._new_memory(num_bytes)
        self._parts = []

    def _new_memory(self, num_bytes: int) -> _Memory:
        return _Memory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))


@dataclass(slots=True)
class Attached:
    """Holds arrays that go to the device with a step's others: `tensors` once these are sent."""

    arrays: Sequence[NDArray[Any]]
    tensors: list[torch.Tensor] = field(default_factory=list)


class _Memory:
    """Holds a piece of the device's memory, and views of it: steps of the same sizes ask for the same ones."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_device, self.capacity = on_device, len(on_device)  # bytes
        self._views: dict[tuple[int, np.dtype[Any], tuple[int, ...]], torch.Tensor] = {}

    def view(self, begin: int, array: NDArray[Any]) -> torch.Tensor:
        """Returns what an array is on the device, from the byte `begin` on."""
        key = begin, array.dtype, array.shape
        if (view := self._views.get(key)) is None:
            place = self.on_device[begin : begin + array.nbytes]
            view = place.view(_TORCH[array.dtype]).view(array.shape)
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view


class _Part:
    """Holds arrays that are copied to one piece of the device's memory."""

    def __init__(self, memory: _Memory) -> None:
        self._memory, self.capacity, self.num_used = memory, memory.capacity, 0  # bytes
        pins = memory.on_device.device.type == "cuda"
        self._on_host = torch.empty(memory.capacity, dtype=torch.uint8, pin_memory=pins)
        self._values = self._on_host.numpy()

    def has_room(self, num_bytes: int) -> bool:
        return _aligned(self.num_used, _ALIGNMENT) + num_bytes <= self.capacity

    def align(self, alignment: int) -> None:
        self.num_used = min(_aligned(self.num_used, alignment), self.capacity)

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        begin = _aligned(self.num_used, _ALIGNMENT)
        self.num_used = begin + array.nbytes
        self._values[begin : self.num_used] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._memory.view(begin, array)

    def send(self) -> None:
        sent = slice(self.num_used)
        self._memory.on_device[sent].copy_(self._on_host[sent], non_blocking=True)


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Returns the arrays on the device, of a step of their own: in one copy, while the host goes on."""
    staging = Staging(device, sum(_aligned(array.nbytes, _ALIGNMENT) for array in arrays))
    staging.start()
    tensors = [staging.add(array) for array in arrays]
    staging.send()
    return tensors


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


class Download:
    """Holds results of a step that are on their way to the host."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        """Starts the copy of `results`, which come as float64: ids below 2^53 are exact."""
        self._shapes = [each.shape for each in results]
        packed = torch.cat([each.reshape(-1).double() for each in results])
        is_cuda = packed.device.type == "cuda"
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
