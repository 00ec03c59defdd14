"""The keys, or the values, of one layer in the KV pool: in the model's dtype, or in FP8 with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.fp8 import dequantize, quantize


@dataclass(frozen=True, slots=True)
class KVPool:
    """Holds the rows of all slots. What is read of it is in `dtype`, a copy only where rows have scales."""

    rows: (
        torch.Tensor
    )  # [num_blocks, block_size, kv_heads, head_dim]; uint8 where there are scales (`kernels.fp8`)
    scales: torch.Tensor | None = None  # float16 [num_blocks, block_size, kv_heads]
    read_dtype: torch.dtype | None = None  # None: that of the rows

    @classmethod
    def holding(cls, rows: torch.Tensor, *, is_fp8: bool) -> KVPool:
        """Returns a pool of rows [num_blocks, block_size, kv_heads, head_dim], or of what FP8 leaves of them."""
        return cls(*quantize(rows), rows.dtype) if is_fp8 else cls(rows)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of what is read and written."""
        return self.read_dtype or self.rows.dtype

    @property
    def block_size(self) -> int:
        """Returns the slots of a block."""
        return self.rows.shape[1]

    @property
    def num_slots(self) -> int:
        """Returns the slots of all blocks."""
        return self.rows.shape[0] * self.rows.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Returns the KV heads."""
        return self.rows.shape[2]

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows and scales for a kernel, which is given the rows again where there are none."""
        return self.rows, self.rows if self.scales is None else self.scales

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows [n, kv_heads, head_dim] to slots, int64 or int32 [n]."""
        if self.scales is None:
            _put(self.rows, slots, rows.to(self.rows.dtype))
            return
        quantized, scales = quantize(rows)
        _put(self.rows, slots, quantized)
        _put(self.scales, slots, scales)

    def read(self, slots: slice | torch.Tensor) -> torch.Tensor:
        """Returns the rows [n, kv_heads, head_dim] of n slots; of a slice a view, where rows have no scales."""
        rows = self.rows.flatten(0, 1)[slots]
        return rows if self.scales is None else dequantize(rows, self.scales.flatten(0, 1)[slots], self.dtype)


def _put(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    pool.flatten(0, 1).index_copy_(0, slots.long(), rows)  # a view: [num_slots, ...]
