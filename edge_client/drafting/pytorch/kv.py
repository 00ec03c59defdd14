"""Keeps the KV of one sequence: for each layer one buffer that is made ahead, so that rollback is a smaller number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.fp8 import dequantize, quantize

FIRST_CAPACITY = 512  # slots; doubles until the draft's context, by copying


class KvBuffer:
    """Holds the keys and values of the layers by slot, in the dtype that they are computed in or in FP8.

    In FP8 each slot and KV head has a float16 scale of its own, fixed when the slot is written. So what is appended
    or rolled back changes nothing before it.
    """

    def __init__(self, max_slots: int, is_fp8: bool) -> None:
        self._max_slots = max_slots
        self._is_fp8 = is_fp8
        self.capacity = 0
        self._layers: dict[int, tuple[_Part, _Part]] = {}  # keys and values, made when they are first written

    @property
    def num_bytes(self) -> int:
        """Returns the size of all buffers in bytes."""
        return sum(part.num_bytes for parts in self._layers.values() for part in parts)

    def reserve(self, needed: int) -> None:
        """Makes room for `needed` slots; what is in the buffers stays."""
        if needed <= self.capacity:
            return
        capacity = max(self.capacity, FIRST_CAPACITY)
        while capacity < needed:
            capacity *= 2
        self.capacity = min(capacity, self._max_slots)
        for parts in self._layers.values():
            for part in parts:
                part.grow(self.capacity)

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a layer's keys and values [kv_heads, n, size] to the slots from `start` on. Returns those of all slots
        up to the last of them [kv_heads, start + n, size], as they will be read later too."""
        if layer not in self._layers:
            self._layers[layer] = self._new_part(key), self._new_part(value)
        keys, values = self._layers[layer]
        return keys.append(key, start), values.append(value, start)

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copies rising `slots` to those from `start` on."""
        if list(slots) == list(range(start, start + len(slots))):
            return
        for parts in self._layers.values():
            for part in parts:
                part.move(slots, start)

    def check_integrity(self) -> None:
        """Asserts that all layers have room for the same slots."""
        for layer, parts in self._layers.items():
            for part in parts:
                assert part.capacity == self.capacity, f"layer {layer} has another capacity"

    def _new_part(self, rows: torch.Tensor) -> _Part:
        shape = (rows.shape[0], self.capacity, rows.shape[2])
        return _Fp8Part(shape, rows) if self._is_fp8 else _Part(shape, rows)


class _Part:
    """Holds one layer's keys, or its values, as they are."""

    def __init__(self, shape: tuple[int, int, int], like: torch.Tensor) -> None:
        self._tensors = [like.new_zeros(shape)]  # [kv_heads, capacity, …] each

    @property
    def capacity(self) -> int:
        return self._tensors[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors)

    def append(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + rows.shape[1]
        self._tensors[0][:, start:stop] = rows
        return self._tensors[0][:, :stop]

    def move(self, slots: Sequence[int], start: int) -> None:
        for tensor in self._tensors:
            index = torch.tensor(slots, device=tensor.device)
            tensor[:, start : start + len(slots)] = tensor.index_select(1, index)

    def grow(self, capacity: int) -> None:
        for number, tensor in enumerate(self._tensors):
            larger = tensor.new_zeros((tensor.shape[0], capacity, *tensor.shape[2:]))
            larger[:, : tensor.shape[1]] = tensor
            self._tensors[number] = larger


class _Fp8Part(_Part):
    def __init__(self, shape: tuple[int, int, int], like: torch.Tensor) -> None:
        self._tensors = [
            like.new_zeros(shape, dtype=torch.uint8),
            like.new_zeros(shape[:2], dtype=torch.float16),
        ]

    def append(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + rows.shape[1]
        codes, scales = self._tensors
        codes[:, start:stop], scales[:, start:stop] = quantize(rows)
        return dequantize(codes[:, :stop], scales[:, :stop], rows.dtype)
