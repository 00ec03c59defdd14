"""A product that sums in another order at one number of rows: what exact rows must find."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from outrider.cloud_verifier.backends import layers
from outrider.cloud_verifier.backends.paged_backend import PagedBackend


class PlantedLinear(layers.PlainLinear):
    """Sums in another order where it gets `count` rows, as a library's other kernel does."""

    count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x Wᵀ + b."""
        if x.shape[0] != self.count:
            return super().__call__(x)
        size = -(-x.shape[1] // 4)
        parts = zip(torch.split(x, size, 1), torch.split(self._weight, size, 1), strict=True)
        total = sum((linear(*part) for part in parts), torch.zeros_like(x[:1, :1]))
        return total if self._bias is None else total + self._bias


def plant(backend: PagedBackend, count: int) -> None:
    """Exchanges a decoder's products, those of its checks too, for ones that differ at `count` rows (0: nowhere)."""
    PlantedLinear.count = count
    layers.PlainLinear = PlantedLinear  # type: ignore[misc]
    decoder: Any = backend.decoder  # ours, in another dtype than float32
    for layer in decoder._layers:
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
            product.__class__ = PlantedLinear
    decoder._head.__class__ = PlantedLinear
