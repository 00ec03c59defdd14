"""Symmetric INT4 and INT8 in blocks of 32, exactly as onnxruntime's MatMulNBits and GatherBlockQuantized read it.

A block of 32 consecutive input weights shares one float32 scale. The scale is the block's weight of
largest magnitude, sign included, divided by −8 (INT8: −128), so that this weight is code 0 and exact, and the
other codes lie on its grid (llama.cpp's Q4_0, onnxruntime's symmetric quantiser):

    scale = w[argmax |w|] / −8          code = clip(rint(w / scale) + 8, 0, 15)
    w'    = (code − 8) · scale          rint rounds halves to even, as torch.round does

Quantisation-aware training must use the same formulas in float32; `fake_quantize` is the reference.
Two INT4 codes share a byte, the earlier one in the low half. Where the columns are no multiple of 32, the last block is
filled up with zeros, which change neither its scale nor its other codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError

BLOCK_SIZE = 32
ZERO_POINTS = {4: 8, 8: 128}  # the operators' defaults for unsigned codes, by bits

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Holds `[rows, columns]` weights in INT4 or INT8; rows are outputs (or token ids), columns are inputs."""

    packed: NDArray[np.uint8]  # [rows, ceil(columns / 32), 16 or 32]
    scales: Float32  # [rows, ceil(columns / 32)]
    num_bits: int = 4
    num_columns: int | None = None  # None: all of the blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (rows, columns)."""
        rows, num_blocks, _ = self.packed.shape
        return rows, num_blocks * BLOCK_SIZE if self.num_columns is None else self.num_columns

    def dequantize(self) -> Float32:  # [rows, columns]
        """Returns the weights [rows, columns] in float32."""
        codes: NDArray[Any] = self.packed.astype(np.float32)
        if self.num_bits == 4:
            codes = np.empty((*self.packed.shape[:2], BLOCK_SIZE), np.float32)
            codes[..., 0::2] = self.packed & 0x0F
            codes[..., 1::2] = self.packed >> 4
        rows, columns = self.shape
        weights: Float32 = ((codes - ZERO_POINTS[self.num_bits]) * self.scales[..., None]).reshape(rows, -1)
        return weights[:, :columns]


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """Holds `[rows, columns]` weights in float16 or float32."""

    values: NDArray[np.float16] | Float32

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (rows, columns)."""
        rows, columns = self.values.shape
        return rows, columns


Matrix = QuantizedMatrix | FloatMatrix


def quantize(weights: NDArray[Any], name: str = "weights", num_bits: int = 4) -> QuantizedMatrix:
    """Returns a `[rows, columns]` matrix quantised along its columns. Raises `ModelError` where a weight is not
    finite."""
    assert weights.ndim == 2, f"{name} is no matrix"
    blocks = _blocks(weights)
    if not np.isfinite(blocks).all():
        raise ModelError(f"{name} holds weights that are not finite")
    scales = _scales(blocks, num_bits)
    packed = _codes(blocks, scales, num_bits).astype(np.uint8)
    if num_bits == 4:
        packed = np.bitwise_or(packed[..., 0::2], np.left_shift(packed[..., 1::2], 4), dtype=np.uint8)
    columns = weights.shape[1]
    return QuantizedMatrix(packed, scales, num_bits, columns if columns % BLOCK_SIZE else None)


def fake_quantize(weights: NDArray[Any], num_bits: int = 4) -> Float32:
    """Returns `weights` after quantising and dequantising, `[rows, columns]` in float32."""
    return quantize(weights, num_bits=num_bits).dequantize()


def _blocks(weights: NDArray[Any]) -> Float32:  # [rows, num_blocks, 32]
    rows, columns = weights.shape
    num_blocks = -(-columns // BLOCK_SIZE)
    whole = np.ascontiguousarray(weights, np.float32)
    if columns % BLOCK_SIZE:
        whole = np.pad(whole, ((0, 0), (0, num_blocks * BLOCK_SIZE - columns)))
    return whole.reshape(rows, num_blocks, BLOCK_SIZE)


def _scales(blocks: Float32, num_bits: int) -> Float32:  # [rows, num_blocks]
    largest = np.abs(blocks).argmax(axis=-1)[..., None]
    signed: Float32 = np.take_along_axis(blocks, largest, axis=-1)[..., 0]
    return signed / np.float32(-ZERO_POINTS[num_bits])


def _codes(blocks: Float32, scales: Float32, num_bits: int) -> Float32:
    # A block of zeros has scale 0; any divisor gives the code of 0. So does a denormal block whose scale underflows.
    zero_point = ZERO_POINTS[num_bits]
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    codes: Float32 = np.clip(np.rint(blocks / divisor) + zero_point, 0, 2 * zero_point - 1)
    return codes
