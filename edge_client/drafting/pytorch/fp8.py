"""FP8 (e4m3): numbers in one byte with a scale for each row of them."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def quantise(rows: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [..., size] in uint8, whose bits are e4m3, and scales [..., 1]: a row's largest number has the
    largest code. A row depends on nothing but itself; numbers that are not finite stay so."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    smallest = torch.finfo(scale_dtype).tiny  # below it a scale would have fewer digits
    scales = (largest / E4M3_MAX).clamp(min=smallest).to(scale_dtype)
    # A scale that was rounded down leaves quotients a little above the largest code, which would become NaN.
    codes = (rows.float() / scales.float()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.view(torch.uint8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers [..., size] that `codes` and `scales` mean."""
    return (codes.view(E4M3).float() * scales.float()).to(dtype)


def is_possible(device: torch.device) -> bool:
    """Returns whether a device has the dtype."""
    try:
        torch.zeros(1, device=device).to(E4M3).float().cpu()
    except (RuntimeError, TypeError):
        return False
    return True
