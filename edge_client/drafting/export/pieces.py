"""The pieces that a draft's graph is made of: matrices in a precision, norms, activations, an embedding, a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.edge_client.drafting.export.precision import encode
from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE, FloatMatrix, Matrix
from outrider.edge_client.drafting.export.weights import Float32, Linear
from outrider.edge_client.drafting.export.writer import MICROSOFT, OnnxWriter
from outrider.edge_client.drafting.spec import ATTENTION_BIAS, HIDDEN, POSITION_IDS

_ACTIVATIONS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {  # operator, domain, attributes
    "silu": ("QuickGelu", MICROSOFT, {"alpha": 1.0}),  # x·sigmoid(x)
    "quick_gelu": ("QuickGelu", MICROSOFT, {"alpha": 1.702}),
    "gelu": ("Gelu", "", {"approximate": "none"}),
    "gelu_tanh": ("Gelu", "", {"approximate": "tanh"}),
    "relu": ("Relu", "", {}),
}


class GraphPieces(OnnxWriter):
    """Writes pieces; each takes the name of its input and returns that of its output, `[1, n, size]` both."""

    def __init__(self, precision: str, accuracy_level: int) -> None:
        super().__init__(accuracy_level)
        self._precision = precision
        self._tables: dict[str, Matrix] = {}
        self.fallbacks: dict[str, str] = {}  # tensors in another precision, and in which

    # ------------------------------------------------------------------ matrices

    def linear(self, name: str, linear: Linear, hidden: str) -> str:
        """Multiplies by a matrix of weights and adds its bias."""
        matrix = self._encode(name, linear)
        self.matrix(name, matrix)
        bias = f"{name}.bias" if linear.bias is not None else ""
        if linear.bias is not None:
            self.constant(bias, linear.bias)
        self.matmul(f"{name}.out", hidden, name, matrix, bias)
        return f"{name}.out"

    def embed(self, name: str, table: Linear, ids: str) -> str:
        """Looks `ids` [1, n] up in a table that `score` can read too."""
        matrix = self._tables[name] = self._encode(name, table)
        if isinstance(matrix, FloatMatrix):
            self.matrix(name, matrix)
            self.node("Gather", [f"{name}.table", ids], ["embedded.rows"])
            return self.as_float("embedded.rows")
        # The head's packed rows [rows, blocks, 16 bytes] are gathered as they are: one copy of a
        # tied table, whose blocks become [1, n, blocks, 32] and then [1, n, hidden].
        self.constant(f"{name}.packed", matrix.packed)
        self.constant(f"{name}.block_scales", matrix.scales[..., None])
        num_blocks, (_, columns) = matrix.packed.shape[1], matrix.shape
        self.constant("hidden_shape", np.array([1, -1, num_blocks * BLOCK_SIZE], np.int64))
        inputs = [f"{name}.packed", ids, f"{name}.block_scales"]
        attributes = {"bits": matrix.num_bits, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 2}
        self.node("GatherBlockQuantized", inputs, ["embedded_blocks"], MICROSOFT, **attributes)
        self.node("Reshape", ["embedded_blocks", "hidden_shape"], ["embedded"])
        return self._first_columns("embedded", columns, num_blocks * BLOCK_SIZE)

    def score(
        self, out: str, hidden: str, name: str, table: Linear | None, tied_to: str, bias: Float32 | None
    ) -> None:
        """Multiplies by an output embedding, or without a `table` by that of `embed`."""
        matrix = self._tables[tied_to] if table is None else self._encode(name, table)
        stored = tied_to if table is None else name
        if table is not None:
            self.matrix(name, matrix)
        elif not isinstance(
            matrix, FloatMatrix
        ):  # its packed rows are there, their scales have another shape
            self.constant(f"{name}.scales", matrix.scales)
        if bias is not None:
            self.constant(f"{name}.bias", bias)
        self.matmul(out, hidden, name, matrix, "" if bias is None else f"{name}.bias", stored)

    def _encode(self, name: str, linear: Linear) -> Matrix:
        matrix, found = encode(linear.weights, self._precision, name)
        if found != self._precision:
            self.fallbacks |= dict.fromkeys(linear.tensors, found)
        return matrix

    def _first_columns(self, name: str, columns: int, size: int) -> str:
        if columns == size:
            return name
        for part, value in {"start": 0, "end": columns, "axis": -1}.items():
            self.constant(f"{name}.{part}", np.array([value], np.int64))
        self.node("Slice", [name, *(f"{name}.{part}" for part in ("start", "end", "axis"))], [f"{name}.cut"])
        return f"{name}.cut"

    # ------------------------------------------------------------------ everything else

    def norm(
        self, name: str, weight: Float32, bias: Float32 | None, hidden: str, residual: str, epsilon: float
    ) -> tuple[str, str]:
        """Adds an RMS norm of hidden + residual, with a bias a layer norm; returns the names of the norm and of the
        sum."""
        prefix, parts = "Simplified", [f"{name}.weight"]
        self.constant(parts[0], weight)
        if bias is not None:
            prefix, parts = "", [*parts, f"{name}.bias"]
            self.constant(parts[1], bias)
        if not residual:
            operator = f"{prefix}LayerNormalization"
            self.node(operator, [hidden, *parts], [f"{name}.out"], epsilon=epsilon, axis=-1)
            return f"{name}.out", hidden
        outputs = [f"{name}.out", "", "", f"{name}.sum"]
        operator = f"Skip{prefix}LayerNormalization"
        self.node(operator, [hidden, residual, *parts], outputs, MICROSOFT, epsilon=epsilon)
        return f"{name}.out", f"{name}.sum"

    def head_norm(self, name: str, weight: Float32, hidden: str, num_heads: int, epsilon: float) -> str:
        """Adds an RMS norm of each head, `[1, n, heads · head_dim]` in and out."""
        size = len(weight)
        self.constant(f"{name}.weight", weight)
        self.constant(f"{name}.heads", np.array([1, -1, num_heads, size], np.int64))
        self.constant(f"{name}.flat", np.array([1, -1, num_heads * size], np.int64))
        self.node("Reshape", [hidden, f"{name}.heads"], [f"{name}.in"])
        inputs = [f"{name}.in", f"{name}.weight"]
        self.node("SimplifiedLayerNormalization", inputs, [f"{name}.normed"], epsilon=epsilon, axis=-1)
        self.node("Reshape", [f"{name}.normed", f"{name}.flat"], [f"{name}.out"])
        return f"{name}.out"

    def activation(self, kind: str, hidden: str, prefix: str) -> str:
        """Adds an activation by its name in `hf_config.ACTIVATIONS`."""
        operator, domain, attributes = _ACTIVATIONS[kind]
        self.node(operator, [hidden], [f"{prefix}.{kind}"], domain, **attributes)
        return f"{prefix}.{kind}"

    def softcap(self, name: str, cap: float) -> str:
        """Adds cap · tanh(x / cap)."""
        self.constant(f"{name}.cap", np.array([cap], np.float32))
        self.node("Div", [name, f"{name}.cap"], [f"{name}.share"])
        self.node("Tanh", [f"{name}.share"], [f"{name}.tanh"])
        self.node("Mul", [f"{name}.tanh", f"{name}.cap"], [f"{name}.capped"])
        return f"{name}.capped"

    def window_bias(self, name: str, window: int) -> None:
        """Adds `name`: the attention bias that also hides the slots `window` and more before a token's position."""
        self.constant(f"{name}.reach", np.array([window - 1], np.int64))
        self.constant(f"{name}.hidden", np.array(HIDDEN, np.float32))
        self.constant(f"{name}.axes", np.array([1, 3], np.int64))
        for part, value in {"zero": 0, "one": 1}.items():
            self.constant(f"{name}.{part}", np.array(value, np.int64))
        self.node("Shape", [ATTENTION_BIAS], [f"{name}.length"], start=3, end=4)
        self.node("Squeeze", [f"{name}.length"], [f"{name}.total"])
        self.node("Range", [f"{name}.zero", f"{name}.total", f"{name}.one"], [f"{name}.slots"])
        self.node("Sub", [POSITION_IDS, f"{name}.reach"], [f"{name}.firsts"])
        self.node("Unsqueeze", [f"{name}.firsts", f"{name}.axes"], [f"{name}.first"])  # [1, 1, n, 1]
        self.node("Less", [f"{name}.slots", f"{name}.first"], [f"{name}.is_far"])
        self.node("Where", [f"{name}.is_far", f"{name}.hidden", ATTENTION_BIAS], [name])
