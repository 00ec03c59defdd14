"""INT4 in the training loop: the rounding of `outrider.edge_client.drafting.export.quantize`, in torch, with a
straight-through gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    """Returns the weight quantised in the forward pass, the identity in the backward pass (Bengio et al.
    2013)."""
    with torch.no_grad():
        change = fake_quantize(weight) - weight
    return weight + change


def quantized_weights(model: Any) -> dict[str, Tensor]:
    """Returns every matrix of the decoder stack under `straight_through`, for
    `torch.func.functional_call`."""
    return {
        name: straight_through(param) for name, param in model.model.named_parameters() if param.ndim == 2
    }


def head_weight(model: Any, weights: dict[str, Tensor]) -> Tensor:
    """Returns the output embedding, [vocab, hidden_size], that belongs to `weights` of the stack (none: as
    it is)."""
    head: Tensor = model.get_output_embeddings().weight
    if not weights:
        return head
    return weights["embed_tokens.weight"] if model.config.tie_word_embeddings else straight_through(head)


@torch.no_grad()
def quantize_in_place(model: Any) -> None:
    """Replace every matrix by its quantised value; exporting it then changes nothing more."""
    for param in model.parameters():
        if param.ndim == 2:
            param.copy_(fake_quantize(param))


@contextmanager
def quantized(model: Any) -> Iterator[None]:
    """Makes the model as the edge will have it, for as long as the context lasts."""
    kept = [param.detach().clone() for param in model.parameters()]
    quantize_in_place(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)


def require_blocks(model: Any) -> None:
    """Raise ValueError naming a matrix whose rows are not whole INT4 blocks."""
    for name, param in model.named_parameters():
        if param.ndim == 2 and param.size(1) % BLOCK_SIZE:
            raise ValueError(f"{name} has {param.size(1)} columns; INT4 needs a multiple of {BLOCK_SIZE}")
