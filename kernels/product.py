"""Matrix products for CUDA, in Triton, with one order of summation: a row's bits follow from the row and the weight.

A tile is some rows by some outputs. Its sums run over all inputs in order, in steps of `INPUTS`, within one program;
tiles have one size whatever the number of rows, and what a tile has beyond the last row or input adds exact zeros.
There are as many programs as multiprocessors, each with every so many tiles, in an order by which those that share a
tile of the weight come together. The idea is that of the persistent matrix product of Thinking Machines' "Defeating
Nondeterminism in LLM Inference" (2025).

It is what is left where the library's products fail the check at the start (`cloud_verifier.backends.products`), and
slower: on an H100 1.7 times as slow for up to 64 rows of a 7B model, 2.2 for 128 (docs/gpu.md).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from outrider.kernels.paged_attention import num_warps, product

ROWS = 64  # of a tile: the fewest that Hopper's tensor cores take, as most steps have few
OUTPUTS = 64  # so that a matrix of 7B's shapes has a tile for nearly each multiprocessor, even with few rows
INPUTS = 64
INTERPRETED_PROGRAMS = 3  # so that one has several tiles


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, num_outputs, num_inputs, output_stride, input_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Runs one program: every so many tiles, the rows' of one part of the weight after each other."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_tiles = num_row_tiles * tl.cdiv(num_outputs, OUTPUTS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tile % num_row_tiles * ROWS + tl.arange(0, ROWS)
        output = tile // num_row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        is_row, is_output = row < num_rows, output < num_outputs
        row_at = x + row.to(tl.int64)[:, None] * num_inputs
        output_at = weight + output.to(tl.int64)[None, :] * output_stride
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for first in range(0, num_inputs, INPUTS):
            place = first + tl.arange(0, INPUTS)
            is_input = place < num_inputs
            left = tl.load(row_at + place[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            at = output_at + place.to(tl.int64)[:, None] * input_stride
            right = tl.load(at, mask=is_input[:, None] & is_output[None, :], other=0.0)
            total += product(left, right, IS_INTERPRETED)
        if HAS_BIAS:
            total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        at = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x Wᵀ + b [..., out] for x [..., in], a weight [out, in] of any strides and a bias [out].

    All are float32, bfloat16 or float16 alike. Sums are float32, and rounded once, after the bias.
    """
    num_outputs, num_inputs = weight.shape
    rows = x.reshape(-1, num_inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], num_outputs))
    # Triton launches on the current device, wherever its tensors are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _multiply[(num_programs(x.device),)](
            rows, weight, out if bias is None else bias, out,
            rows.shape[0], num_outputs, num_inputs, weight.stride(0), weight.stride(1),
            ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS, HAS_BIAS=bias is not None,
            IS_INTERPRETED=not isinstance(_multiply, triton.JITFunction), num_warps=num_warps(x.dtype),
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


@functools.cache
def num_programs(device: torch.device) -> int:
    """Returns the programs of a launch: one a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
