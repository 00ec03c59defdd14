"""Which kernels compute what a decoder layer does beside its products and its attention.

Triton's on CUDA (`outrider.kernels.layers`), numba's in float32 on a CPU (`outrider.kernels.host_layers`), and torch's
own (`outrider.kernels.plain_layers`) where neither runs.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from outrider.kernels import plain_layers
from outrider.kernels.kv_pool import KVPool

logger = logging.getLogger(__name__)


class LayerKernels(Protocol):
    """Declares the kernels of a layer, so that the modules with them are checked against it;
    `outrider.kernels.plain_layers` says what they compute."""

    def add_norm(
        self,
        states: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
    ) -> None:
        """Adds, and normalises."""

    def rotate(
        self,
        qkv: torch.Tensor,
        norms: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        key_pool: KVPool,
        value_pool: KVPool,
    ) -> None:
        """Rotates queries and keys, and writes keys and values to their slots."""

    def gate(self, gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
        """Applies the activation to gates, and multiplies."""


def host_kernels(dtype: torch.dtype) -> LayerKernels:
    """Returns the kernels for a CPU: numba's for float32, where they can be compiled, else torch's own."""
    if dtype != torch.float32:
        return plain_layers
    try:
        from outrider.kernels import host_layers
    except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
        logger.debug("a layer's kernels are torch's own: %s", error)
        return plain_layers
    return host_layers


def device_kernels(device: str) -> LayerKernels:
    """Returns Triton's kernels where one of them runs on `device`, else torch's own, with a warning."""
    if device == "cpu":
        return plain_layers
    try:
        from outrider.kernels import layers

        row = torch.ones((1, 16), device=device)
        layers.add_norm(row, None, row[0], 1e-5, torch.empty_like(row))
    except Exception as error:  # no Triton, no compiler for it, a GPU that it does not support
        logger.warning(
            "a layer's kernels are torch's own, which takes longer: Triton's do not run here (%s)", error
        )
        return plain_layers
    return layers
