"""Symmetric INT4 in blocks of 32, exactly as onnxruntime's MatMulNBits and GatherBlockQuantized read it.

A block of 32 consecutive input weights shares one float32 scale. The scale is the block's weight of
largest magnitude, sign included, divided by −8, so that this weight is code 0 and exact, and the
fifteen other codes lie on its grid (llama.cpp's Q4_0, onnxruntime's symmetric quantiser):

    scale = w[argmax |w|] / −8          code = clip(rint(w / scale) + 8, 0, 15)
    w'    = (code − 8) · scale          rint rounds halves to even, as torch.round does

Quantisation-aware training must use the same formulas in float32; `fake_quantize` is the reference.
Two codes share a byte, the earlier one in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError

BLOCK_SIZE = 32
ZERO_POINT = 8  # the operators' default for unsigned 4-bit codes

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Holds `[rows, columns]` weights in INT4; rows are outputs (or token ids), columns are inputs."""

    packed: NDArray[np.uint8]  # [rows, columns // 32, 16]
    scales: Float32  # [rows, columns // 32]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (rows, columns)."""
        rows, num_blocks, _ = self.packed.shape
        return rows, num_blocks * BLOCK_SIZE

    def dequantize(self) -> Float32:  # [rows, columns]
        """Returns the weights [rows, columns] in float32."""
        codes = np.empty((*self.packed.shape[:2], BLOCK_SIZE), np.float32)
        codes[..., 0::2] = self.packed & 0x0F
        codes[..., 1::2] = self.packed >> 4
        return ((codes - ZERO_POINT) * self.scales[..., None]).reshape(self.shape)


def quantize(weights: NDArray[Any], name: str = "weights") -> QuantizedMatrix:
    """Returns a `[rows, columns]` matrix quantised along its columns.

    Raises `ModelError` where the columns are not a multiple of 32 or a weight is not finite.
    """
    if weights.ndim != 2 or weights.shape[1] % BLOCK_SIZE:
        shape = "x".join(map(str, weights.shape))
        raise ModelError(f"{name} is {shape}: INT4 needs input sizes that are multiples of {BLOCK_SIZE}")
    blocks = _blocks(weights)
    if not np.isfinite(blocks).all():
        raise ModelError(f"{name} holds weights that are not finite")
    scales = _scales(blocks)
    codes = _codes(blocks, scales).astype(np.uint8)
    packed = np.bitwise_or(codes[..., 0::2], np.left_shift(codes[..., 1::2], 4), dtype=np.uint8)
    return QuantizedMatrix(packed=packed, scales=scales)


def fake_quantize(weights: NDArray[Any]) -> Float32:
    """Returns `weights` after quantising and dequantising, `[rows, columns]` in float32."""
    return quantize(weights).dequantize()


def _blocks(weights: NDArray[Any]) -> Float32:  # [rows, num_blocks, 32]
    rows, columns = weights.shape
    return np.ascontiguousarray(weights, np.float32).reshape(rows, columns // BLOCK_SIZE, BLOCK_SIZE)


def _scales(blocks: Float32) -> Float32:  # [rows, num_blocks]
    largest = np.abs(blocks).argmax(axis=-1)[..., None]
    signed: Float32 = np.take_along_axis(blocks, largest, axis=-1)[..., 0]
    return signed / np.float32(-ZERO_POINT)


def _codes(blocks: Float32, scales: Float32) -> Float32:
    # A block of zeros has scale 0; any divisor gives code 8, which is 0. So does a denormal block
    # whose scale underflows.
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    codes: Float32 = np.clip(np.rint(blocks / divisor) + ZERO_POINT, 0, 15)
    return codes
