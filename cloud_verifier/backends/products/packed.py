"""Products in float32 on a CPU with weights that never change: the library's over packed weights, ours for few rows.

MKL packs the weights anew for every call, so that five rows take twice the time of one; oneDNN packs them once. But its
products are made for many rows: one row takes up to twice as long as the weights take to be read, and at each product
every thread waits for the slowest, which on cores that others use too costs more than threads bring. Our kernel
(`outrider.kernels.host.product`) is used for few rows, where it has oneDNN's bits and takes little longer: so a clock
decides about time, and never about bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, Product, cancelling_weight

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 2, 4, 8)
MOST_OWN_ROWS = TIMED_ROWS[-1]
NUM_TURNS = 3
# One thread multiplies, and leaves the other cores to what else runs there. Served on two cores with edges beside it,
# the embedded target writes 1.1 to 1.2 times as much speculative text with our kernel for up to eight rows, for which
# it takes 1.4 times as long by itself, as with the library's from three on.
MAX_SHARE = 1.6
PACK_ROWS = 8  # oneDNN's hint: of 1, 4, 8 and 16 the best over 1 to 64 rows

Matrix = NDArray[np.float32]
# Of rows [n, in], a weight [in, out] and what is written, [n, out].
Multiply = Callable[[Matrix, Matrix, Matrix], None]


class OwnKernel:
    """Says for how many rows the matrices of a decoder are multiplied by our kernel: `most_rows`, at first none."""

    def __init__(self) -> None:
        self.most_rows = 0
        self.multiply: Multiply | None = None

    def load(self, products: Sequence[PackedLinear], kinds: Iterable[MatrixKind]) -> None:
        """Sets `most_rows` for these products, which are of these kinds."""
        try:
            from outrider.kernels.host.product import multiply_rows
        except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
            logger.debug("rows are multiplied by the library alone: %s", error)
            return
        self.multiply = multiply_rows
        if all(map(self._has_equal_bits, kinds)):
            self.most_rows = _most_fast_rows(products)
        for product in products:
            product.settle(is_doubled=self.most_rows > 0)
        logger.debug("up to %d rows are multiplied by our kernel", self.most_rows)

    def _has_equal_bits(self, kind: MatrixKind) -> bool:
        """Returns whether rows, beside others, have the bits that the library gives to as many."""
        weight = cancelling_weight(kind, torch.float32, torch.device("cpu"))
        product = PackedLinear(weight, None, self)
        x = torch.randn((MOST_OWN_ROWS, kind.num_inputs), generator=torch.Generator().manual_seed(0))
        x[::2] = 1.0  # whose products are rounding error alone
        found = product.by_own_kernel(x)
        return all(
            torch.equal(product.by_library(x[:count]), found[:count]) for count in range(1, len(x) + 1)
        )


class PackedLinear:
    """Computes x [rows, in] → x Wᵀ + b [rows, out] for weights that never change."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, own: OwnKernel) -> None:
        """`weight` is [out, in]; `own` is shared by the matrices of a decoder."""
        self.num_inputs = weight.shape[1]
        self._bias, self._own = bias, own
        self._transposed: Matrix | None = None  # [in, out], what our kernel reads
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._pointwise = torch.ops.mkldnn._linear_pointwise.default

    def settle(self, *, is_doubled: bool) -> None:
        """Makes, or drops, what our kernel reads."""
        if not is_doubled:
            self._transposed = None
        elif self._transposed is None:
            self._transposed = self._packed.to_dense().t().contiguous().numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_few = 0 < x.shape[0] <= self._own.most_rows
        return self.by_own_kernel(x) if is_few else self.by_library(x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def by_own_kernel(self, x: torch.Tensor) -> torch.Tensor:
        if self._transposed is None:
            self.settle(is_doubled=True)
        assert self._transposed is not None and self._own.multiply is not None
        out = np.empty((x.shape[0], self._transposed.shape[1]), np.float32)
        self._own.multiply(x.contiguous().numpy(), self._transposed, out)
        found = torch.from_numpy(out)
        return found if self._bias is None else found.add_(self._bias)


@torch.inference_mode()
def _most_fast_rows(products: Sequence[PackedLinear]) -> int:
    """Returns for how many rows, of `TIMED_ROWS`, our kernel takes `MAX_SHARE` of the library's time at most; 0: for
    none."""
    most = 0
    for num_rows in TIMED_ROWS:
        rows = {each.num_inputs: torch.ones(num_rows, each.num_inputs) for each in products}
        own = [(each.by_own_kernel, rows[each.num_inputs]) for each in products]
        library = [(each.by_library, rows[each.num_inputs]) for each in products]
        turns = [(_seconds(own), _seconds(library)) for _ in range(NUM_TURNS)]
        if min(first for first, _ in turns) > MAX_SHARE * min(second for _, second in turns):
            break
        most = num_rows
    return most


def _seconds(runs: Sequence[tuple[Product, torch.Tensor]]) -> float:
    start = time.perf_counter()
    for product, x in runs:
        product(x)
    return time.perf_counter() - start
