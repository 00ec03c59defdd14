"""Products in float32 on a CPU with weights that never change: the library's over packed weights, ours for few rows.

MKL packs the weights anew for every call, so that five rows take twice the time of one; oneDNN packs them once. But its
products are made for many rows: one row takes up to twice as long as the weights take to be read, and at each product
every thread waits for the slowest, which on cores that others use too costs more than threads bring. Our kernel
(`outrider.kernels.host.product`) waits for no thread that does not compute (`host.threads`). It is used for few rows,
where it has oneDNN's bits and takes about as long: so a clock decides about time, and never about bits. Of weights that
are numbers of bfloat16, as those of most published models, it reads half the bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, Product, cancelling_weight

if TYPE_CHECKING:
    from outrider.kernels.host.product import PanelProduct
    from outrider.kernels.host.threads import Helpers

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 8, 16, 24, 40, 64, 96, 128)  # for which our kernel's time is compared with the library's
MANY_ROWS = 64  # for which its bits are compared
MIN_TURNS, MAX_TURNS = 2, 6  # of a comparison of times
# Ours may take so much of the library's time, as on cores that others use it takes less. Chosen with the embedded
# target on Zen 5 (docs/benchmarks.md).
MAX_SHARE = 1.3
SPIN_S = 0.005  # for longer the library's threads do not spin, on cores that helpers need
PACK_ROWS = 8  # oneDNN's hint: of 1, 4, 8 and 16 the best over 1 to 64 rows

Runs = Sequence[tuple[Product, torch.Tensor]]
# Of a weight [out, in], and how many inputs are summed by themselves.
MakeProduct = Callable[[NDArray[np.float32], int], "PanelProduct"]


class OwnKernel:
    """Says for how many rows the matrices of a decoder are multiplied by our kernel: `most_rows`, at first none."""

    def __init__(self) -> None:
        self.most_rows = 0
        self.make: MakeProduct | None = None
        self._helpers: Helpers | None = None
        self.spans: dict[tuple[int, int], int] = {}  # by inputs and outputs of a matrix

    def load(self, products: Sequence[PackedLinear], kinds: Iterable[MatrixKind]) -> None:
        """Sets `most_rows` for these products, which are of these kinds."""
        try:
            from outrider.kernels.host.product import SPANS, PanelProduct
            from outrider.kernels.host.threads import helpers
        except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
            logger.debug("rows are multiplied by the library alone: %s", error)
            return
        self.make, self._helpers = PanelProduct, helpers(torch.get_num_threads())
        if all(self._find_span(kind, SPANS) for kind in kinds):
            self.most_rows = _most_fast_rows(products)
        for product in products:
            product.settle(is_doubled=self.most_rows > 0)
        logger.debug("up to %d rows are multiplied by our kernel", self.most_rows)

    @property
    def helpers(self) -> Helpers:
        """Returns who takes part in a product, once `load` has found our kernel."""
        assert self._helpers is not None
        return self._helpers

    def _find_span(self, kind: MatrixKind, spans: Sequence[int]) -> bool:
        """Returns whether rows have the bits that the library gives to many, and notes the span with which they do."""
        x = torch.randn((MANY_ROWS, kind.num_inputs), generator=torch.Generator().manual_seed(0))
        x[::2] = 1.0  # whose products are rounding error alone
        wide = cancelling_weight(kind, torch.float32, torch.device("cpu"))
        # Our kernel reads the second otherwise.
        products = [PackedLinear(weight, None, self) for weight in (wide, wide.bfloat16().float())]
        expected = [product.by_library(x) for product in products]
        for span in spans:
            self.spans[kind.num_inputs, kind.num_outputs] = span
            for product in products:
                product.settle(is_doubled=False)
            found = [product.by_own_kernel(x) for product in products]
            if all(map(torch.equal, found, expected)):
                return True
        return False


class PackedLinear:
    """Computes x [rows, in] → x Wᵀ + b [rows, out] for weights that never change."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, own: OwnKernel) -> None:
        """`weight` is [out, in]; `own` is shared by the matrices of a decoder."""
        self.num_outputs, self.num_inputs = weight.shape
        self._bias, self._own = bias, own
        self._product: PanelProduct | None = None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._pointwise = torch.ops.mkldnn._linear_pointwise.default

    def settle(self, *, is_doubled: bool) -> None:
        """Makes, or drops, what our kernel reads."""
        if not is_doubled:
            self._product = None
        elif self._product is None:
            assert self._own.make is not None
            span = self._own.spans[self.num_inputs, self.num_outputs]
            self._product = self._own.make(self._packed.to_dense().numpy(), span)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Returns those of our kernel's function, of what it is given, and of the bias (0: none), for
        `host.product.multiply`."""
        product = self._own_product()
        bias_at = 0 if self._bias is None else self._bias.data_ptr()
        return product.function_at, product.call_at, bias_at

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_few = 0 < x.shape[0] <= self._own.most_rows
        return self.by_own_kernel(x) if is_few else self.by_library(x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def by_own_kernel(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32, "the kernel is given addresses alone"
        num_rows, x = x.shape[0], x.contiguous()
        out = x.new_empty((num_rows, self.num_outputs))
        self._own_product().multiply(x.data_ptr(), num_rows, out.data_ptr(), self._own.helpers)
        return out if self._bias is None else out.add_(self._bias)

    def _own_product(self) -> PanelProduct:
        """Returns what our kernel reads, made where it is not there."""
        if self._product is None:
            self.settle(is_doubled=True)
        assert self._product is not None
        return self._product


@torch.inference_mode()
def _most_fast_rows(products: Sequence[PackedLinear]) -> int:
    """Returns for how many rows our kernel is used: for as many as take `MAX_SHARE` of the library's time at most. 0:
    for none."""
    most = 0
    for num_rows in TIMED_ROWS:
        rows = {each.num_inputs: torch.ones(num_rows, each.num_inputs) for each in products}
        own = [(each.by_own_kernel, rows[each.num_inputs]) for each in products]
        library = [(each.by_library, rows[each.num_inputs]) for each in products]
        if _share(own, library) > MAX_SHARE:
            break
        most = num_rows
    return most


def _share(own: Runs, library: Runs) -> float:
    """Returns the time of the first : the second's. Others may run on these cores: so each product's least time counts,
    and more than `MAX_SHARE` is measured again."""
    share = np.inf
    own_s = library_s = np.full(len(own), np.inf)
    for turn in range(MAX_TURNS):
        time.sleep(SPIN_S)
        own_s, library_s = np.minimum(own_s, _seconds(own)), np.minimum(library_s, _seconds(library))
        share = own_s.sum() / library_s.sum()
        if turn + 1 >= MIN_TURNS and share <= MAX_SHARE:
            break
    return float(share)


def _seconds(runs: Runs) -> list[float]:
    """Returns the time of each."""
    times = [time.perf_counter()]
    for product, x in runs:
        product(x)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]
