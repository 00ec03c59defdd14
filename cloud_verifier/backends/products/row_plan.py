"""The row counts with which forwards are run so that a row's bits do not depend on the rows beside it.

A library chooses its kernel by the shape of a product, and kernels differ in the order in which they sum. So a
token verified among five rows may get other last bits than one decoded alone. `find_row_plan` measures which
counts give a row the same bits in every matrix of a model; forwards are then padded and split to those counts.
Devices differ in which counts are worth a try and in what they cost (`RowChoices`); of large matrices fewer are tried,
by their sizes alone. Measured times decide only between counts of equal bits: a target has the same bits after each
start on one machine, however busy that is. The idea is that of Thinking Machines' "Defeating Nondeterminism in LLM
Inference" (2025), with measured counts first and a kernel of our own (`ways`) only where no count does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.cloud_verifier.backends.products.timing import device_ms

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] → [rows, out]

DISTINCT_OUTPUTS = 256  # rows of a tested weight, which are repeated
MIN_GAIN = 0.95  # a count is left out where a larger one takes less than this share of its time
NUM_TIMED = 5  # products of each count
NUM_TURNS = 2  # products of a count and a matrix: a row in every place, beside other rows
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

    def without_slow(self, times: Mapping[int, float]) -> RowPlan:
        """Returns the plan without counts for which a larger one takes clearly less time, as a library's do with which
        it runs another kernel; `times` of all counts, in one unit."""
        kept: list[int] = []
        for count in reversed(self.counts):
            if not any(times[larger] < MIN_GAIN * times[count] for larger in kept):
                kept.append(count)
        return RowPlan(tuple(reversed(kept)))


@dataclass(frozen=True, slots=True)
class RowChoices:
    """Says which counts are tried on a kind of device, and how the cheapest plan is found."""

    counts: tuple[int, ...]
    usual: tuple[
        int, ...
    ]  # rows of decoding, verifying, several sessions, prefill: a plan's cost is taken at these
    pass_rows: int  # a further pass over the weights costs about as much as so many rows
    free_rows: int  # rows that take no longer than the weights take to be read
    max_multiplications: float  # of the products that are tried, a pass over the weights counted as its rows
    has_other_kernels: bool  # norms and activations are kernels chosen by the number of rows, too

    def cost(self, plan: RowPlan) -> int:
        """Returns the rows computed for the usual ones, a pass counted too."""
        return sum(self._cost(plan, num_rows) for num_rows in self.usual)

    def _cost(self, plan: RowPlan, num_rows: int) -> int:
        num_full, rest = divmod(num_rows, plan.most)
        return num_full * self._cost_of_pass(plan.most) + (self._cost_of_pass(plan.fit(rest)) if rest else 0)

    def tried(self, kinds: Sequence[MatrixKind]) -> tuple[int, ...]:
        """Returns the counts that are tried with these matrices: all, or as many as `max_multiplications` allows, at
        least one. The one that makes a plan cheapest comes first, then the one that makes it cheapest with that, …"""
        num_numbers = sum(kind.num_inputs * kind.num_outputs for kind in kinds)
        room = self.max_multiplications / (NUM_TURNS * num_numbers)  # in rows
        chosen: tuple[int, ...] = ()
        while larger := [
            tuple(sorted((*chosen, count)))
            for count in self.counts
            if count not in chosen and sum(map(self._cost_of_pass, (*chosen, count))) <= room
        ]:
            chosen = min(larger, key=lambda counts: self.cost(RowPlan(counts)))
        return chosen or self.counts[:1]

    def _cost_of_pass(self, count: int) -> int:
        return self.pass_rows + max(self.free_rows, count)

    def cheapest(self, bits: Mapping[int, Hashable]) -> RowPlan | None:
        """Returns the cheapest plan of counts with equal `bits`, None where no count has any (None)."""
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for count in sorted(bits):
            if bits[count] is not None:
                groups[bits[count]].append(count)
        return min((RowPlan(tuple(group)) for group in groups.values()), key=self.cost, default=None)


# Matrix-vector kernels, for one row, sum in another order; a packed product of 4 rows takes less time than one
# of 1, 2 or 3 (oneDNN on AVX-512, the embedded target's matrices: 3.1, 3.9, 4.5 and 3.6 ms). Each further count
# takes 0.5 MiB for each kind of matrix, and its share of the start.
ON_CPU = RowChoices(
    counts=(4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256),
    usual=(1, 5, 40, 512),
    pass_rows=16,
    free_rows=0,
    max_multiplications=2e11,  # 5 s of two cores with AVX-512, of which one does 2e10 a second for the embedded target
    has_other_kernels=False,
)
# Of bfloat16 products a GPU does 200 to 300 operations in the time in which it reads a byte, two a row: up to about
# 200 rows cost what one does. So a single count, hence a single algorithm, is nearly free. The largest is a step's
# default size: of 320 rows in passes of 128 an H100 took 1.7 times as long as of all at once.
ON_GPU = RowChoices(
    counts=(8, 16, 32, 64, 128, 256, 384, 512),
    usual=(1, 5, 16, 40, 80, 128, 512),
    pass_rows=0,
    free_rows=200,
    max_multiplications=1e15,  # seconds of an H100: all counts for any model
    has_other_kernels=True,
)


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """Describes matrices that are multiplied alike: their sizes, and how such a product is made of a weight
    [out, in]."""

    num_inputs: int
    num_outputs: int
    make: Callable[[torch.Tensor], Product]


def find_row_plan(
    kinds: Sequence[MatrixKind], dtype: torch.dtype, device: torch.device, choices: RowChoices = ON_CPU
) -> RowPlan | None:
    """Returns the cheapest plan, of the counts that are tried, with which every kind of matrix gives a row the same
    bits in every place and beside any others; None where no count does."""
    bits: dict[int, list[bytes | None]] = {count: [] for count in choices.tried(kinds)}
    for kind in kinds:
        product = kind.make(cancelling_weight(kind, dtype, device))
        others = _other_rows(kind.num_inputs, max(bits), dtype, device)
        for count, found in bits.items():
            found.append(_row_bits(product, others[:, :count]))
    return choices.cheapest({count: None if None in found else tuple(found) for count, found in bits.items()})


def products_ms(
    kinds: Sequence[MatrixKind], counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[int, float]:
    """Returns the time on a GPU of one product of every kind, for each number of rows."""
    times = dict.fromkeys(counts, 0.0)
    for kind in kinds:
        product = kind.make(cancelling_weight(kind, dtype, device))
        rows = _other_rows(kind.num_inputs, max(counts), dtype, device)[0]
        for count in counts:
            times[count] += device_ms(partial(product, rows[:count]), device, NUM_TIMED)
    return times


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


def _other_rows(num_inputs: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns rows beside which a row is multiplied, in two turns [2, count, in]: the second's are the largest."""
    generator = torch.Generator().manual_seed(num_inputs)
    others = torch.randn((NUM_TURNS, count, num_inputs), generator=generator)
    others[1] *= 2.0**MAX_EXPONENT
    return others.to(device=device, dtype=dtype)


def _row_bits(product: Product, others: torch.Tensor) -> bytes | None:
    """Returns the bits of a row of ones among others [2, count, in], None where its place or they change them."""
    count, found = others.shape[1], list[torch.Tensor]()
    for turn, (first, last) in enumerate(((0, count - 1), (1, 0))):  # in every place, once
        x = others[turn].clone()
        x[first::2] = x[last] = 1.0
        out = product(x)
        found += [out[first::2], out[last : last + 1]]
    rows = torch.cat(found)
    # Widening keeps bits apart; numpy has no bfloat16.
    return rows[0].float().cpu().numpy().tobytes() if bool((rows == rows[0]).all()) else None
