"""A product that sums in another order at one number of rows: what exact rows must find."""

from __future__ import annotations

from typing import Any

import torch

from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend


class PlantedLinear(torch.nn.Linear):
    """Sums in another order where it gets `count` rows, as a library's other kernel does."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x Wᵀ + b."""
        if x.shape[-2] != self.count:
            return super().forward(x)
        half = self.in_features // 2
        first = torch.nn.functional.linear(x[..., :half], self.weight[:, :half])
        return torch.nn.functional.linear(x[..., half:], self.weight[:, half:], self.bias) + first


def plant(backend: TransformersBackend, count: int) -> None:
    """Exchanges the class of a model's matrices for one that differs at `count` rows (0: nowhere)."""
    PlantedLinear.count = count
    decoder: Any = backend.decoder  # that of transformers
    for module in decoder._model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = PlantedLinear
