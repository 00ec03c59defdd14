"""FP8 (e4m3) rows with a scale each, for kernels in Triton: bit for bit what `outrider.kernels.fp8` computes.

Numbers are made of bits by integer operations, which every compute capability has; conversions of this type are there
from 8.9 on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.fp8 import LEAST_SCALE, MOST

_MOST, _LEAST_SCALE = tl.constexpr(MOST), tl.constexpr(LEAST_SCALE)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
# Added to a number below the least normal one, it leaves the number's multiple of 2⁻⁹, rounded, in its lowest bits.
_MULTIPLES = tl.constexpr(2.0**14)
_BITS_OF_MULTIPLES = tl.constexpr((127 + 14) << 23)
_ROUND_DOWN = tl.constexpr((1 << 19) - 1)
_BIAS = tl.constexpr((127 - 7) << 3)


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """Returns the float16 scale of a row whose largest magnitude this is, in float32."""
    return tl.where(largest == largest, tl.maximum(largest * (1.0 / _MOST), _LEAST_SCALE), largest).to(
        tl.float16
    )


@triton.jit
def encode(numbers, scale):  # type: ignore[no-untyped-def]
    """Returns the uint8 of float32 numbers of a row with this float16 scale."""
    scaled = tl.div_rn(numbers, scale.to(tl.float32))
    magnitude = tl.minimum(tl.abs(scaled), _MOST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + _ROUND_DOWN + ((bits >> 20) & 1)) >> 20) - _BIAS
    small = (magnitude + _MULTIPLES).to(tl.int32, bitcast=True) - _BITS_OF_MULTIPLES
    code = tl.where(magnitude < _LEAST_NORMAL, small, normal)
    return (code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode(codes, scales):  # type: ignore[no-untyped-def]
    """Returns in float32 the numbers of uint8 codes, each with the float16 scale of its row."""
    wide = codes.to(tl.int16)
    halves = ((wide & 127) << 7) | ((wide & 128) << 8)  # 2⁻⁸ times the number, as float16
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scales.to(tl.float32)
