"""The ways in which a decoder's matrices are multiplied, so that a row gets the same bits everywhere.

On CUDA a library may split the inner dimension of a product over several blocks, by its shape and by what is free
(split-K), so that few numbers of rows have the same bits, or none has bits of its own. The same library can be told not
to, and our own kernel has one order of summation (`outrider.kernels.product`), and is slower. Which way is taken is
settled by the numbers of rows that agree in each (`row_plan`) and by `relative_cost`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from outrider.common.errors import ModelError

# x [..., in], weight [out, in], bias [out] → x Wᵀ + b [..., out]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class ProductWay:
    """Multiplies as the library chooses to."""

    name = "the library"
    relative_cost = 1.0  # of a pass, to the library's

    def enter(self, dtype: torch.dtype) -> Linear:
        """Returns the product; for some ways settings of the process are changed. Raises `ModelError` where this
        machine does not offer it."""
        return linear

    def leave(self) -> None:
        """Changes settings back."""


class UnsplitLibrary(ProductWay):
    """Multiplies by the library's products that are not split.

    torch 2.10 and later offer that at any time, for bfloat16 and cuBLASLt. The variables to the same end
    (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE) are read at a process's first product, which the way before
    this one has had.
    """

    name = "the library without split-K"

    def enter(self, dtype: torch.dtype) -> Linear:
        if dtype != torch.bfloat16:
            raise ModelError(f"torch has no setting for it in {dtype}")
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
            raise ModelError(f"torch {torch.__version__} has no setting for it, 2.10 does")
        matmul = torch.backends.cuda.matmul
        self._before = (
            torch.backends.cuda.preferred_blas_library(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        return linear

    def leave(self) -> None:
        library, *settings = self._before
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = tuple(settings)
        torch.backends.cuda.preferred_blas_library(library)


class OwnKernel(ProductWay):
    """Multiplies by `outrider.kernels.product`."""

    name = "our kernel"
    relative_cost = 2.0  # 1.7 for up to 64 rows of a 7B model on an H100, 2.2 for 128, 3.9 for 320

    def enter(self, dtype: torch.dtype) -> Linear:
        try:
            from outrider.kernels.product import linear as own_linear
        except ImportError as error:
            raise ModelError("Triton is not installed") from error
        return own_linear


def product_ways(device: str) -> tuple[ProductWay, ...]:
    """Returns the ways to try on a device; of equal ones the first is taken."""
    if device == "cpu":
        return (ProductWay(),)
    return (ProductWay(), UnsplitLibrary(), OwnKernel())
