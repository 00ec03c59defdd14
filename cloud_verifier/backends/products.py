"""The ways in which a decoder's matrices are multiplied: tried in order until one gives a row the same bits everywhere.

On CUDA a library may split the inner dimension of a product over several blocks, by its shape and by what is free
(split-K), so that no number of rows has bits of its own. Then the same library is told not to, and if that does not
help, or cannot be done, our own kernel multiplies (`outrider.kernels.product`), slower and with one order of
summation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear

from outrider.common.errors import ModelError

# x [..., in], weight [out, in], bias [out] → x Wᵀ + b [..., out]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class HasProducts(Protocol):
    """Declares what a way needs of a decoder."""

    def use_linear(self, linear: Linear) -> None:
        """Multiplies by `linear` from now on."""


@dataclass(frozen=True, slots=True)
class ProductWay:
    """Names a way to multiply. `use` enters it, for a decoder, and leaves it if the check fails inside.

    Entering raises `ModelError` where this machine does not offer it.
    """

    name: str
    use: Callable[[HasProducts, torch.dtype], AbstractContextManager[None]]


@contextlib.contextmanager
def _library(decoder: HasProducts, dtype: torch.dtype) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _no_split_k(decoder: HasProducts, dtype: torch.dtype) -> Iterator[None]:
    """Sets what torch 2.10 and later offer at any time, for bfloat16 products of cuBLASLt. The variables to the same
    end (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE) are read at a process's first product, which the way
    before this one has had."""
    if dtype != torch.bfloat16:
        raise ModelError(f"torch has no setting for it in {dtype}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise ModelError(f"torch {torch.__version__} has no setting for it, 2.10 does")
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    library = torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    except RuntimeError as error:
        raise ModelError(str(error)) from error
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    except BaseException:
        matmul.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(library)
        raise


@contextlib.contextmanager
def _own_kernel(decoder: HasProducts, dtype: torch.dtype) -> Iterator[None]:
    try:
        from outrider.kernels.product import linear as own_linear
    except ImportError as error:
        raise ModelError("Triton is not installed") from error
    decoder.use_linear(own_linear)
    try:
        yield
    except BaseException:
        decoder.use_linear(linear)
        raise


LIBRARY = ProductWay("the library", _library)
LIBRARY_UNSPLIT = ProductWay("the library without split-K", _no_split_k)
OWN_KERNEL = ProductWay("our kernel", _own_kernel)


def product_ways(device: str) -> tuple[ProductWay, ...]:
    """Returns the ways to try on a device, the fastest first."""
    if device == "cpu":
        return (LIBRARY,)
    return (LIBRARY, LIBRARY_UNSPLIT, OWN_KERNEL)
