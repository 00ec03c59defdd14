"""The memory of the paged KV pool, on the device."""

from __future__ import annotations

import math
import mmap

import torch

from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.kernels.kv_pool import KVPool


class PoolMemory:
    """Holds keys and values of all layers by block. The last block is a spare one: that of rows that only pad."""

    def __init__(self, facts: TargetFacts, num_blocks: int, block_size: int) -> None:
        self.device = torch.device(facts.device)
        self._facts = facts
        self._heads = (facts.num_layers, num_blocks + 1, block_size, facts.num_kv_heads)
        self.renew()

    def renew(self) -> None:
        """Allocates fresh memory: what was written before is never read again."""
        facts, heads = self._facts, self._heads
        shape, dtype = (*heads, facts.head_dim), getattr(torch, facts.dtype)
        # Of all layers, [layers, num_blocks, block_size, kv_heads, ...]: rows of keys and of values, and their scales.
        self.tensors: list[torch.Tensor] = []
        self.key_pools: list[KVPool] = []  # views of them, per layer; the old go before the new ones come
        self.value_pools: list[KVPool] = []
        for pools in (self.key_pools, self.value_pools):
            rows = _zeros(shape, torch.uint8 if facts.has_fp8_kv else dtype, self.device)
            scales = _zeros(heads, torch.float16, self.device) if facts.has_fp8_kv else None
            self.tensors += [rows] if scales is None else [rows, scales]
            for layer in range(facts.num_layers):
                pools.append(KVPool(rows[layer], None if scales is None else scales[layer], dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On a CPU they come from the operating system, page by page as they are written to.

    Small pages: sequences are far apart in the pool, and a step that wrote the first token of one waited for 12 large
    pages to be cleared in the embedded target's pool (65 ms, in place of 0.1).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
