"""The paged attention kernel in Triton's interpreter: its error, and the rows whose bits depend on others."""

from __future__ import annotations

from dataclasses import asdict

import torch

from benchmarks.gpu_check.attention_cases import (
    MAX_ERROR,
    LengthSplits,
    Sizes,
    changed_rows,
    measure_kernel,
)
from benchmarks.gpu_check.stage import NONE, Target
from benchmarks.results_file import Found
from outrider.experiments.shared.results import Measure, at_least, at_most, judged

# The embedded target's, 7B's with one KV head, and sizes that are no powers of two.
ERROR_SIZES = (Sizes(6, 2, 64), Sizes(7, 1, 128), Sizes(4, 2, 24, 4))
BIT_SIZES = Sizes(6, 2, 64)
SPLIT_TOKENS = 128  # for texts of several splits that the interpreter reads in seconds
NUM_BATCHES = 8


def run() -> Found:
    """Measures the kernel, and a planner with a fault planted in it."""
    found = measure_kernel(ERROR_SIZES, BIT_SIZES, "cpu", SPLIT_TOKENS, NUM_BATCHES)
    planted = changed_rows(
        LengthSplits(BIT_SIZES, "cpu", SPLIT_TOKENS), BIT_SIZES, torch.float32, "cpu", SPLIT_TOKENS
    )
    num_batches = NUM_BATCHES * len(ERROR_SIZES)
    what = f"largest difference from float64 of {num_batches} batches of chains and trees, in the interpreter"
    measures = [
        _significant(f"gpu.kernel_error.{name}", what, found.errors[name], at_most(bound))
        for name, bound in ((str(dtype).removeprefix("torch."), bound) for dtype, bound in MAX_ERROR.items())
    ]
    what = "rows that change with neighbours, number of queries, blocks, or a tree in place of the chain"
    measures.append(judged("gpu.kernel_bits", what, found.num_changed, "rows", NONE))
    what = "the same where splits follow the longest session: the comparison sees it"
    measures.append(judged("gpu.kernel_bits_planted", what, sum(planted.values()), "rows", at_least(1)))
    return measures, {**asdict(found), "planted": planted}


def _significant(id: str, measure: str, value: float, target: Target) -> Measure:
    """Returns a judged measure of a small number: rounded to digits that count."""
    wording, is_met = target
    return Measure(id, measure, float(f"{value:.3g}"), "", wording, is_met(value))
