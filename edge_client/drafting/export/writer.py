"""Writes ONNX graphs: nodes and constants by name, and the operators that we use most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE, FloatMatrix, Matrix

MICROSOFT = "com.microsoft"  # onnxruntime's own operators
OPSET = 21
IR_VERSION = 10
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy level; level 1 keeps float32 and costs up to four times as much


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Describes an input or output of the graph; strings in the shape are free dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class OnnxWriter:
    """Collects a graph. The caller chooses names, which must be unique."""

    def __init__(self, accuracy_level: int) -> None:
        self._accuracy_level = accuracy_level
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._casts: set[str] = set()

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        """Adds a node. An empty name leaves an optional input or output out."""
        from onnx import helper

        self._nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))

    def constant(self, name: str, values: NDArray[Any]) -> None:
        """Adds a constant."""
        from onnx import numpy_helper

        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)

    def matmul(
        self, out: str, hidden: str, name: str, matrix: Matrix, bias: str = "", stored: str = ""
    ) -> None:
        """Multiplies hidden `[..., columns]` by the matrix of `name` (see `matrix`), giving `[..., rows]`. Its rows may
        be `stored` under another name."""
        if isinstance(matrix, FloatMatrix):
            self._float_matmul(out, hidden, stored or name, bias)
            return
        inputs = [hidden, f"{stored or name}.packed", f"{name}.scales", *(["", "", bias] if bias else [])]
        rows, columns = matrix.shape
        sizes = {"N": rows, "K": columns, "bits": matrix.num_bits, "block_size": BLOCK_SIZE}
        self.node("MatMulNBits", inputs, [out], MICROSOFT, accuracy_level=self._accuracy_level, **sizes)

    def _float_matmul(self, out: str, hidden: str, name: str, bias: str) -> None:
        """onnxruntime turns the table into float32 and transposes it once, when it loads the graph."""
        self.node("Transpose", [self.as_float(f"{name}.table")], [f"{out}.columns"], perm=[1, 0])
        self.node("MatMul", [hidden, f"{out}.columns"], [f"{out}.product" if bias else out])
        if bias:
            self.node("Add", [f"{out}.product", bias], [out])

    def as_float(self, name: str) -> str:
        """Casts to float32 and returns the result's name."""
        from onnx import TensorProto

        if f"{name}.float" not in self._casts:
            self._casts.add(f"{name}.float")
            self.node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT)
        return f"{name}.float"

    def matrix(self, name: str, matrix: Matrix) -> None:
        """Adds the constants of a matrix: `NAME.packed` and `NAME.scales`, or `NAME.table`."""
        if isinstance(matrix, FloatMatrix):
            self.constant(f"{name}.table", matrix.values)
        else:
            self.constant(f"{name}.packed", matrix.packed)
            self.constant(f"{name}.scales", matrix.scales)

    def split(self, name: str, sizes: Sequence[int]) -> list[str]:
        """Splits the last axis and returns the names of the parts."""
        self.constant(f"{name}.sizes", np.array(sizes, np.int64))
        parts = [f"{name}.{index}" for index in range(len(sizes))]
        self.node("Split", [name, f"{name}.sizes"], parts, axis=-1)
        return parts

    def rows(self, name: str, indices: str) -> str:
        """Adds `[1, n, size]` → `[1, k, size]` for the indices `[k]` and returns the result's name."""
        self.node("Gather", [name, indices], [f"{name}.rows"], axis=1)
        return f"{name}.rows"

    def model(self, name: str, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo]) -> Any:
        """Returns the finished `onnx.ModelProto`."""
        from onnx import helper

        infos = [[_value_info(value) for value in values] for values in (inputs, outputs)]
        graph = helper.make_graph(self._nodes, name, *infos, list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="outrider")

    def extend(self, graph: Any, *, inputs: Sequence[ValueInfo], outputs: Sequence[ValueInfo]) -> None:
        """Appends the collected nodes to an existing `onnx.GraphProto`, after its own."""
        graph.node.extend(self._nodes)
        graph.initializer.extend(self._constants.values())
        graph.input.extend(map(_value_info, inputs))
        graph.output.extend(map(_value_info, outputs))


def _value_info(value: ValueInfo) -> Any:
    from onnx import helper

    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return helper.make_tensor_value_info(value.name, dtype, value.shape)
