"""FP8 (e4m3) rows with a float16 scale each, in torch: how keys and values are kept in half the memory.

A row's largest number becomes 448, the largest of e4m3, and the scale is rounded before it is used. So a row is a
function of its own numbers alone: what is written before or after it changes nothing.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest finite number of e4m3
LEAST_SCALE = 2.0**-14  # the least float16 that has all its bits


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8, which has the bits of e4m3, and float16 scales [...] of rows [..., size].

    Where a row has a number that is not finite, all that is read of it is NaN.
    """
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scales = (largest * (1 / MOST)).clamp_min(LEAST_SCALE).to(torch.float16)
    scaled = (wide / scales.float()[..., None]).clamp_(-MOST, MOST)
    return scaled.to(FP8).view(torch.uint8), scales


def dequantize(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers [..., size] of what `quantize` returned, rounded to `dtype` once."""
    return (rows.view(FP8).float() * scales.float()[..., None]).to(dtype)
