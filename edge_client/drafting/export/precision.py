"""Says what numbers an export keeps its weights in, and turns a matrix into them."""

from __future__ import annotations

import numpy as np

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.export.quantize import Float32, FloatMatrix, Matrix, quantize

INT4, INT8, FLOAT16, FLOAT32 = "int4", "int8", "fp16", "fp32"
PRECISIONS = (INT4, INT8, FLOAT16)  # from the smallest
_NUM_BITS = {INT4: 4, INT8: 8}
_LARGEST_FLOAT16 = 65504.0


def encode(weights: Float32, precision: str, name: str) -> tuple[Matrix, str]:
    """Returns `[rows, columns]` weights in a precision, and in which one: float16 falls back to float32 where a weight
    is larger than it can say. Raises `ModelError` where a weight is not finite."""
    if precision in _NUM_BITS:
        return quantize(weights, name, _NUM_BITS[precision]), precision
    if not np.isfinite(weights).all():
        raise ModelError(f"{name} holds weights that are not finite")
    if precision == FLOAT16 and np.abs(weights).max(initial=0.0) <= _LARGEST_FLOAT16:
        return FloatMatrix(weights.astype(np.float16)), FLOAT16
    return FloatMatrix(weights.astype(np.float32)), FLOAT32


def round_to(weights: Float32, precision: str) -> Float32:
    """Returns weights `[rows, columns]` as an export in a precision computes with them, in float32."""
    matrix, _ = encode(weights, precision, "weights")
    return matrix.values.astype(np.float32) if isinstance(matrix, FloatMatrix) else matrix.dequantize()
