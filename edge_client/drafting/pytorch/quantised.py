"""Linear layers whose weights are quantised once, when they are loaded: NF4 by bitsandbytes, and FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from outrider.common.errors import ModelError
from outrider.common.process.extras import needs_extra
from outrider.common.process.hub_kernels import without_hub_kernels
from outrider.edge_client.drafting.backend import FP8, NF4
from outrider.kernels.fp8 import FP8 as E4M3
from outrider.kernels.fp8 import quantize


class Fp8Linear(torch.nn.Module):
    """Multiplies by e4m3 weights with a scale for each row, which are dequantised for each product."""

    codes: torch.Tensor  # [out, in] uint8
    scales: torch.Tensor  # [out] float16

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        codes, scales = quantize(source.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product [..., out] with `x` [..., in]."""
        # A row's scale is that of a column of the product, where it is a multiplication for each token alone.
        out = (linear(x, self.codes.view(E4M3).to(x.dtype)).float() * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias


class Nf4Linear(torch.nn.Module):
    """Multiplies by NF4 weights in blocks of 64, whose scales are quantised too (Dettmers 2023, QLoRA, section 3)."""

    packed: torch.Tensor  # [in · out / 2, 1] uint8

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        self._bitsandbytes = import_bitsandbytes()
        packed, self._state = self._bitsandbytes.functional.quantize_4bit(
            source.weight.data, blocksize=64, compress_statistics=True, quant_type=NF4
        )
        self.register_buffer("packed", packed)
        self.bias = source.bias

    @property
    def num_scale_bytes(self) -> int:
        """Returns the size of the scales."""
        state = self._state
        return int(
            state.absmax.nbytes + state.state2.absmax.nbytes + state.state2.code.nbytes + state.code.nbytes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product [..., out] with `x` [..., in].

        On a CPU weights are dequantised for each product: the kernel of bitsandbytes for a single row rounds to
        bfloat16, so that a token fed alone would get other numbers than one fed with others.
        """
        if x.device.type == "cpu":
            weight = self._bitsandbytes.functional.dequantize_4bit(self.packed, self._state)
            return linear(x, weight.to(x.dtype), self.bias)
        multiply = self._bitsandbytes.matmul_4bit
        out: torch.Tensor = multiply(x, self.packed.t(), quant_state=self._state, bias=self.bias)
        return out


LAYERS: dict[str, Callable[[torch.nn.Linear], torch.nn.Module]] = {NF4: Nf4Linear, FP8: Fp8Linear}


def quantise_layers(model: torch.nn.Module, weights: str, device: torch.device) -> int:
    """Replaces the linear layers of `model` but its head by layers on `device` that are `weights`; embedding, norms and
    head stay as they are. Returns how many it replaced."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear and child is not head
    ]
    for module, name, child in found:
        setattr(module, name, LAYERS[weights](child.to(device)))
    return len(found)


def num_weight_bytes(model: torch.nn.Module) -> int:
    """Returns the size of all weights, those that share memory counted once."""
    tensors = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    scales = sum(each.num_scale_bytes for each in model.modules() if isinstance(each, Nf4Linear))
    return sum(tensors.values()) + scales


def import_bitsandbytes() -> Any:
    """Returns bitsandbytes. Raises `MissingExtraError` without it, `ModelError` where it cannot be loaded here."""
    with needs_extra("edge-torch", "--draft-weights nf4"), without_hub_kernels():
        try:
            import bitsandbytes
        except (RuntimeError, OSError) as error:
            raise ModelError(f"--draft-weights nf4: bitsandbytes cannot be loaded: {error}") from error
    return bitsandbytes
