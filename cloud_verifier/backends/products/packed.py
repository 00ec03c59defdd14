"""Products in float32 on a CPU with weights that never change: the library's over packed weights, ours for few rows.

MKL packs the weights anew for every call, so that five rows take twice the time of one; oneDNN packs them once. But its
products are made for many rows: one row takes up to twice as long as the weights take to be read, and at each product
every thread waits for the slowest, which on cores that others use too costs more than threads bring. Our kernel
(`outrider.kernels.host.product`) is used for few rows, where it has oneDNN's bits and takes about as long: so a clock
decides about time, and never about bits. Of weights that are numbers of bfloat16, as those of most published models, it
reads half the bytes: five rows of the embedded target take half the time that two threads of the library take.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, Product, cancelling_weight

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 8, 12, 16)  # for which our kernel's time is compared with the library's
TIMED_SHARED_ROWS = (24, 40, 64)  # the same with all threads
# For which its bits are compared, and for which it is used beside one thread of the library, where it is clearly faster
# at 16.
MANY_ROWS = 64
MIN_TURNS, MAX_TURNS = 2, 6  # of a comparison of times
# One thread multiplies, and leaves the other cores to what else runs there. Served on two cores with edges beside it,
# the embedded target writes 1.5 times as much speculative text with our kernel at five rows, for which it takes as long
# as the library with two threads, and 1.1 to 1.3 times as much at 10 to 16, for which it takes 1.1 times as long. For
# 32 rows it takes 1.2 times as long, and 32 sessions get 0.8 times as many tokens. (Zen 3. On Zen 5 it takes 1.1 times
# as long for 12 rows, 1.4 to 1.5 for 16; drafts of 8 brought 1.82 times cloud-only's tokens with it, 1.29 without.)
MAX_SHARE = 1.4
# With one thread each it is 0.7 of the library's time at 16 rows and 0.8 at 64; beside two threads 0.8 and 1.7.
FAST_SHARE = 0.9
PACK_ROWS = 8  # oneDNN's hint: of 1, 4, 8 and 16 the best over 1 to 64 rows

Matrix = NDArray[np.float32]
Panels = NDArray[np.float32] | NDArray[np.uint16]  # a weight as our kernel reads it
# Of rows [n, in], a weight, the inputs that are summed by themselves, and what is written, [n, out].
Multiply = Callable[[Matrix, Panels, int, Matrix], None]
Together = Callable[[int, Matrix, Panels, int, Matrix], None]  # the same, first how many threads
Runs = Sequence[tuple[Product, torch.Tensor]]
ByOwn = Callable[["PackedLinear", torch.Tensor], torch.Tensor]


class OwnKernel:
    """Says for how many rows the matrices of a decoder are multiplied by our kernel, at first for none: by one thread
    for up to `most_rows`, by all for up to `most_shared_rows`."""

    def __init__(self) -> None:
        self.most_rows = self.most_shared_rows = 0
        self.multiply: Multiply | None = None
        self.multiply_together: Together | None = None
        self.to_panels: Callable[[Matrix], Panels] | None = None
        self.spans: dict[tuple[int, int], int] = {}  # by inputs and outputs of a matrix

    def load(self, products: Sequence[PackedLinear], kinds: Iterable[MatrixKind]) -> None:
        """Sets `most_rows` for these products, which are of these kinds."""
        try:
            from outrider.kernels.host.product import SPANS, multiply_rows, multiply_rows_together, to_panels
            from outrider.kernels.host.threads import find_runtime
        except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
            logger.debug("rows are multiplied by the library alone: %s", error)
            return
        self.multiply, self.to_panels = multiply_rows, to_panels
        if all(self._find_span(kind, SPANS) for kind in kinds):
            self.most_rows = _most_fast_rows(products)
            runtime = find_runtime()
            if runtime is not None and torch.get_num_threads() > 1:
                self.multiply_together = functools.partial(multiply_rows_together, runtime)
                self.most_shared_rows = _most_fast_shared_rows(products)
        most = max(self.most_rows, self.most_shared_rows)
        for product in products:
            product.settle(is_doubled=most > 0)
        logger.debug(
            "up to %d rows are multiplied by our kernel, up to %d by one thread", most, self.most_rows
        )

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
        self._panels: Panels | None = None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._pointwise = torch.ops.mkldnn._linear_pointwise.default

    def settle(self, *, is_doubled: bool) -> None:
        """Makes, or drops, what our kernel reads."""
        if not is_doubled:
            self._panels = None
        elif self._panels is None:
            assert self._own.to_panels is not None
            self._panels = self._own.to_panels(self._packed.to_dense().numpy())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if 0 < num_rows <= self._own.most_rows:
            return self.by_own_kernel(x)
        return self.by_all_threads(x) if 0 < num_rows <= self._own.most_shared_rows else self.by_library(x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def by_own_kernel(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product by our kernel and one thread."""
        assert self._own.multiply is not None
        return self._by_own(x, self._own.multiply)

    def by_all_threads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product by our kernel and as many threads as the library has."""
        assert self._own.multiply_together is not None
        return self._by_own(x, functools.partial(self._own.multiply_together, torch.get_num_threads()))

    def _by_own(self, x: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        if self._panels is None:
            self.settle(is_doubled=True)
        assert self._panels is not None
        out = np.empty((x.shape[0], self.num_outputs), np.float32)
        span = self._own.spans[self.num_inputs, self.num_outputs]
        multiply(x.contiguous().numpy(), self._panels, span, out)
        found = torch.from_numpy(out)
        return found if self._bias is None else found.add_(self._bias)


@torch.inference_mode()
def _most_fast_rows(products: Sequence[PackedLinear]) -> int:
    """Returns for how many rows our kernel is used: for as many as take `MAX_SHARE` of the library's time at most, and
    for `MANY_ROWS` where the library has one thread and the most that are timed take `FAST_SHARE`. 0: for none."""
    most, share = 0, 0.0
    for num_rows in TIMED_ROWS:
        share = _share(products, PackedLinear.by_own_kernel, num_rows, MAX_SHARE)
        if share > MAX_SHARE:
            return most
        most = num_rows
    return MANY_ROWS if torch.get_num_threads() == 1 and share <= FAST_SHARE else most


@torch.inference_mode()
def _most_fast_shared_rows(products: Sequence[PackedLinear]) -> int:
    """Returns for how many rows our kernel is used with all threads: for as many as take no longer than the library."""
    most = 0
    for num_rows in TIMED_SHARED_ROWS:
        if _share(products, PackedLinear.by_all_threads, num_rows, 1.0) > 1.0:
            break
        most = num_rows
    return most


def _share(products: Sequence[PackedLinear], by_own: ByOwn, num_rows: int, enough: float) -> float:
    """Returns our kernel's time : the library's. Others may run on these cores: so each product's least time counts,
    and more than `enough` is measured again."""
    rows = {each.num_inputs: torch.ones(num_rows, each.num_inputs) for each in products}
    own = [(functools.partial(by_own, each), rows[each.num_inputs]) for each in products]
    library = [(each.by_library, rows[each.num_inputs]) for each in products]
    share = np.inf
    own_s = library_s = np.full(len(own), np.inf)
    for turn in range(MAX_TURNS):
        own_s, library_s = np.minimum(own_s, _seconds(own)), np.minimum(library_s, _seconds(library))
        share = own_s.sum() / library_s.sum()
        if turn + 1 >= MIN_TURNS and share <= enough:
            break
    return float(share)


def _seconds(runs: Runs) -> list[float]:
    """Returns the time of each."""
    times = [time.perf_counter()]
    for product, x in runs:
        product(x)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]
