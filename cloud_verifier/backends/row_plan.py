"""The row counts with which forwards are run so that a row's bits do not depend on the rows beside it.

A library chooses its kernel by the shape of a product, and kernels differ in the order in which they sum. So a
token verified among five rows may get other last bits than one decoded alone. `find_row_plan` measures which
counts give a row the same bits in every matrix of a model; forwards are then padded and split to those counts.
Nothing here depends on the device. The idea is that of Thinking Machines' "Defeating Nondeterminism in LLM
Inference" (2025), with measured counts in place of kernels of our own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] → [rows, out]

# Matrix-vector kernels, for one row, sum in another order; a packed product of 4 rows takes less time than one
# of 1, 2 or 3 (oneDNN on AVX-512, the embedded target's matrices: 3.1, 3.9, 4.5 and 3.6 ms). Each further count
# takes 0.5 MiB for each kind of matrix, and its share of the start.
COUNTS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256)
# Decoding, verifying, several sessions, prefill: a plan's cost is taken at these.
USUAL_COUNTS = (1, 5, 40, 512)
PASS_ROWS = 16  # a further pass over the weights costs about as much as this many rows
MAX_PROBE_S = 4.0  # of products; what is not tried by then is not used
DISTINCT_OUTPUTS = 256  # rows of a tested weight, which are repeated
MAX_EXPONENT = 12  # of the tested summands: so far apart that every order of summation rounds differently


def padded_rows(num_rows: int) -> int:
    """Returns how many rows a CPU is given for `num_rows` without a plan: at most 1/16 more.

    oneDNN compiles code for each shape of a product and keeps 560 KiB for each, of 1,024 shapes at most. Steps
    of 2 to 249 rows made resident memory grow by 640 MiB, padded by 190, and nothing was compiled twice. Up to 32
    rows nothing is padded; above there are 16 sizes between powers of two.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 5)
    return -(-num_rows // step) * step


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Holds the row counts that may be run, ascending. Fewer rows are padded, more are split."""

    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """Returns the most rows of one pass."""
        return self.counts[-1]

    def fit(self, num_rows: int) -> int:
        """Returns the count with which `num_rows` (at most `most`) are run."""
        return next(count for count in self.counts if count >= num_rows)

    @property
    def cost(self) -> int:
        """Returns the rows computed for `USUAL_COUNTS`, a pass counted as `PASS_ROWS`."""
        return sum(self._cost(num_rows) for num_rows in USUAL_COUNTS)

    def _cost(self, num_rows: int) -> int:
        num_full, rest = divmod(num_rows, self.most)
        return num_full * (self.most + PASS_ROWS) + (self.fit(rest) + PASS_ROWS if rest else 0)


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """Describes matrices that are multiplied alike: their sizes, and how such a product is made of a weight
    [out, in]."""

    num_inputs: int
    num_outputs: int
    make: Callable[[torch.Tensor], Product]


def find_row_plan(
    kinds: Sequence[MatrixKind], dtype: torch.dtype, device: torch.device, counts: Sequence[int] = COUNTS
) -> RowPlan | None:
    """Returns the cheapest plan with which every kind of matrix gives a row the same bits, None where no count
    does."""
    bits: dict[int, list[bytes | None]] = {count: [] for count in counts}
    for kind in kinds:
        product = kind.make(cancelling_weight(kind, dtype, device))
        deadline = time.monotonic() + MAX_PROBE_S / len(kinds)
        for count in sorted(bits):
            bits[count].append(_row_bits(product, kind.num_inputs, count, dtype, device))
            if time.monotonic() > deadline:
                bits = {each: bits[each] for each in bits if each <= count}
                break
    groups: defaultdict[tuple[bytes | None, ...], list[int]] = defaultdict(list)
    for count, found in bits.items():
        if None not in found:
            groups[tuple(found)].append(count)
    plans = [RowPlan(tuple(group)) for group in groups.values()]
    return min(plans, key=lambda plan: plan.cost, default=None)


def cancelling_weight(kind: MatrixKind, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a weight [out, in] whose rows sum to zero: what a product with ones returns is rounding error alone.

    So two orders of summation differ in nearly every output, where random weights in bfloat16 would differ in
    one of ten thousand.
    """
    generator = torch.Generator().manual_seed(kind.num_inputs)
    shape = (min(kind.num_outputs, DISTINCT_OUTPUTS), kind.num_inputs // 2)
    exponents = torch.randint(-MAX_EXPONENT, MAX_EXPONENT + 1, shape, generator=generator)
    half = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    weight = torch.zeros(shape[0], kind.num_inputs)
    order = torch.randperm(kind.num_inputs, generator=generator)[: 2 * shape[1]]
    weight[:, order] = torch.cat((half, -half), dim=1)
    num_copies = -(-kind.num_outputs // shape[0])
    return weight.to(device=device, dtype=dtype).repeat(num_copies, 1)[: kind.num_outputs].contiguous()


def _row_bits(
    product: Product, num_inputs: int, count: int, dtype: torch.dtype, device: torch.device
) -> bytes | None:
    """Returns the bits of a row of ones among `count` rows, None where its place or neighbours change them."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, num_inputs, generator=generator).to(device=device, dtype=dtype)
    x[::2] = 1.0
    x[-1] = 1.0
    out = product(x)
    rows = torch.cat((out[::2], out[-1:]))
    # Widening keeps bits apart; numpy has no bfloat16.
    return rows[0].float().cpu().numpy().tobytes() if bool((rows == rows[0]).all()) else None
