"""INT4 in the training loop: the rounding of `edge_client.drafting.quantize`, in torch, with a
straight-through gradient.
"""

from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 32


def fake_quantize(weight: Tensor) -> Tensor:
    """Quantise and dequantise, [rows, columns] float32. Mirrors the numpy reference bit for bit (a test
    compares).
    """
    blocks = weight.reshape(weight.size(0), -1, BLOCK_SIZE)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # sign included
    scales = largest / -8
    codes = (blocks / torch.where(scales == 0, 1.0, scales)).round_().add_(8).clamp_(0, 15)
    return ((codes - 8) * scales).reshape_as(weight)


def straight_through(weight: Tensor) -> Tensor:
    """Quantised in the forward pass, the identity in the backward pass (Bengio et al. 2013)."""
    with torch.no_grad():
        change = fake_quantize(weight) - weight
    return weight + change


def quantized_weights(model: Any) -> dict[str, Tensor]:
    """Every matrix of the decoder stack under `straight_through`, for `torch.func.functional_call`."""
    return {
        name: straight_through(param) for name, param in model.model.named_parameters() if param.ndim == 2
    }


@torch.no_grad()
def quantize_in_place(model: Any) -> None:
    """Replace every matrix by its quantised value; exporting it then changes nothing more."""
    for param in model.model.parameters():
        if param.ndim == 2:
            param.copy_(fake_quantize(param))
