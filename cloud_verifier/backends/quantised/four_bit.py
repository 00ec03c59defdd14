"""bitsandbytes' matrices of 4 bits inside a transformers model: NF4 (Dettmers et al. 2023, arXiv 2305.14314) and FP4.

Only matrices of the layers are of 4 bits, in blocks of 64 numbers with a scale each; embedding, head and norms are of
the target's dtype, and so are biases until bitsandbytes widens them to the dtype that it multiplies in. On a CPU with
AVX512_BF16 it multiplies by a kernel of its own, in bfloat16 whatever the dtype, and repacks a matrix for it in the
first forward; elsewhere it chooses by the number of rows, or makes a whole matrix of the 4 bits and has the library
multiply.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from outrider.cloud_verifier.backends.products.row_plan import Product
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.quantised.choice import Quantisation
from outrider.common.errors import ModelError
from outrider.common.models.memory import NF4_BYTES
from outrider.common.process.extras import needs_extra
from outrider.common.process.hub_kernels import without_hub_kernels

EXTRA = "quant"
# The repacked layout of a CPU's kernel takes outputs by so many.
_PACKED_OUTPUTS = 32
_TABLE_BYTES = 1024  # a matrix's own table of its scales' 256 values


def is_installed() -> bool:
    """Returns whether the extra's packages are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("accelerate", "bitsandbytes"))


def import_bitsandbytes(what: str) -> Any:
    """Returns the module. Raises `MissingExtraError` saying that `what` needs the extra, where a package is missing,
    `ModelError` where it cannot be loaded on this machine."""
    with needs_extra(EXTRA, what), without_hub_kernels():
        try:
            importlib.import_module("accelerate")
            return importlib.import_module("bitsandbytes")
        except (RuntimeError, OSError) as error:
            raise ModelError(f"{what}: bitsandbytes cannot be loaded: {error}") from error


def make_config(quantisation: Quantisation, dtype: torch.dtype, device: str) -> Any:
    """Returns transformers' configuration of 4-bit weights, with double quantisation where they are made here."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantisation.name,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype(dtype, device),
    )


def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Returns in which dtype the matrices are multiplied: the target's, but on a CPU without instructions for
    bfloat16 float32, which is faster there."""
    if device == "cpu" and not _has_bfloat16_instructions():
        return torch.float32
    return dtype


def _has_bfloat16_instructions() -> bool:
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


def num_four_bit_bytes(model: Any, dtype: torch.dtype) -> int:
    """Returns about how many bytes the weights of a model (on any device, such as meta) take once its layers'
    matrices are of 4 bits."""
    kept = {id(parameter) for name in ("input", "output") for parameter in _table(model, name)}
    matrices = {id(p) for p in model.parameters() if p.ndim == 2 and id(p) not in kept}
    sizes = (p.numel() * (NF4_BYTES if id(p) in matrices else dtype.itemsize) for p in model.parameters())
    return int(sum(sizes)) + _TABLE_BYTES * len(matrices)


def _table(model: Any, name: str) -> Iterator[Any]:
    table = getattr(model, f"get_{name}_embeddings")()
    return iter(()) if table is None else table.parameters()


def prepare(model: Any) -> None:
    """Leaves the matrices that the CPU's kernel cannot take to the library; else their first product would fail."""
    for module in model.modules():
        if (state := quant_state(module)) is not None:
            fits = module.out_features % _PACKED_OUTPUTS == 0 and module.in_features % state.blocksize == 0
            module.support_avx512bf16_for_cpu = bool(module.support_avx512bf16_for_cpu) and fits


def quant_state(module: Any) -> Any:
    """Returns bitsandbytes' scales and shape of a matrix of 4 bits, None for any other module."""
    return getattr(getattr(module, "weight", None), "quant_state", None)


def num_bytes(model: Any) -> int:
    """Returns the bytes of a module's parameters and buffers, scales of 4-bit matrices included, each once."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += _tensors_of(quant_state(module))
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


def _tensors_of(state: Any) -> list[torch.Tensor]:
    if state is None:
        return []
    own = [state.absmax, state.code, state.offset]
    nested = [state.state2.absmax, state.state2.code] if state.nested else []
    return [each for each in (*own, *nested) if isinstance(each, torch.Tensor)]


def multiply_by(linear: Linear, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns what `module` computes, by `linear` over a whole matrix made of its 4 bits.

    Raises `ModelError` for a matrix that is packed for a CPU's kernel.
    """
    from bitsandbytes.functional import dequantize_4bit

    state, dtype = quant_state(module), module.compute_dtype
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError("products of 4-bit matrices on a CPU are bitsandbytes' own")
    weight = dequantize_4bit(module.weight.data, state).to(dtype)
    bias = None if module.bias is None else module.bias.to(dtype)
    return linear(x.to(dtype), weight, bias).to(x.dtype)


def other_product(module: Any, weight: torch.Tensor) -> Product:
    """Returns the product of `module`'s kind with another weight [out, in], whose columns are each of about one size.

    4 bits keep of a block its largest number and little of smaller ones. So they are given the weight's signs, which
    they keep exactly, and inputs are multiplied by the columns' sizes: what cancels in the weight still does.
    """
    from bitsandbytes.nn import Params4bit

    state = quant_state(module)
    parameter = Params4bit(
        weight.sign(),
        requires_grad=False,
        blocksize=state.blocksize,
        compress_statistics=module.weight.compress_statistics,
        quant_type=state.quant_type,
        quant_storage=module.quant_storage,
    )
    other = copy.copy(module)
    other._parameters = {**module._parameters, "weight": parameter.to(weight.device)}
    if module.bias is not None:
        other._parameters["bias"] = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
    sizes = weight[0].abs()
    return lambda x: other((x * sizes)[None])[0]
