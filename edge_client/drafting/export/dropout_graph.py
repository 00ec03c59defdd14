"""The variant of an exported draft that tells MC-dropout variance: its graph with one branch more.

    last attention ──▶ norm, gate·up, down, norm, head ──▶ logits, probs …      as in the draft, bit for bit
                  └──▶ the same [num_samples, 1, ·], inputs of gate·up and of down times `dropout_masks`
                         ──▶ the head's rows of the 64 most probable ids ──▶ `candidate_logits`

Everything before is computed once, and nothing that a mask touches is written to the KV. Gal & Ghahramani
2016 drop the inputs of every matrix; dropping in the last layers only, on a network that was not trained with
dropout, is what Brosse et al. 2020 ("On last-layer algorithms …") and Mi et al. 2019 ("Training-free
uncertainty estimation …") measure.

The file holds no large weights: they are read from where the draft has them, which may be the inside of
`draft.onnx`. It names the draft's fingerprint, so that it is never run over another's.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.common.errors import ModelError, UsageError
from outrider.common.process.extras import needs_extra
from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE
from outrider.edge_client.drafting.export.writer import MICROSOFT, OnnxWriter, ValueInfo
from outrider.edge_client.drafting.rows.dropout import DEFAULT_RATE, DEFAULT_SAMPLES, MAX_SAMPLES
from outrider.edge_client.drafting.spec import (
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DEFAULT_PRECISION,
    DROPOUT_FILE,
    DROPOUT_MASKS,
    GRAPH_FILE,
    DraftSpec,
    read_spec,
)

NUM_CANDIDATES = 64
_HEAD = "head_rows"
_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
)  # whose last norms are before the MLP and the head
_MATRIX = "MatMulNBits"
_LEAST_SHARED_BYTES = 1024


def add_dropout(directory: Path, *, num_samples: int = DEFAULT_SAMPLES, rate: float = DEFAULT_RATE) -> Path:
    """Writes `draft.dropout.onnx` beside an exported draft, whose files stay unchanged.

    Thresholds on the variance depend on `num_samples` masks and `rate`, so the file has both. Needs the
    `export` extra. Raises `ModelError` for a directory that is no exported draft or cannot be written to,
    or one in another precision than INT4, `UsageError` for numbers out of range.
    """
    check_numbers(num_samples, rate)
    with needs_extra("export", "draft add-dropout"):
        import onnx
    spec = read_spec(directory)
    _refuse_others(directory, spec)
    model = onnx.load(directory / GRAPH_FILE, load_external_data=False)
    _append_branch(model.graph, spec)
    facts = {
        "draft": spec.fingerprint,
        "samples": str(num_samples),
        "rate": repr(rate),
        "candidates": str(min(NUM_CANDIDATES, spec.num_tokens)),
    }
    onnx.helper.set_model_props(model, facts)
    _share_weights(model.graph, directory / GRAPH_FILE)
    path = directory / DROPOUT_FILE
    try:
        path.write_bytes(model.SerializeToString(deterministic=True))
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def check_numbers(num_samples: int, rate: float) -> None:
    """Raises `UsageError` naming the flag."""
    if not 2 <= num_samples <= MAX_SAMPLES:
        raise UsageError(f"--mc-dropout-samples {num_samples}: a variance needs 2 to {MAX_SAMPLES}")
    if not 0 < rate <= 0.9:
        raise UsageError(f"--mc-dropout-rate {rate:g}: want a share above 0, at most 0.9")


def _refuse_others(directory: Path, spec: DraftSpec) -> None:
    if spec.precision != DEFAULT_PRECISION or spec.fallbacks:
        raise ModelError(
            f"{directory} was exported in {spec.precision}; MC dropout needs INT4 matrices: export it again with "
            "--precision int4"
        )
    if spec.hidden_size % BLOCK_SIZE:
        raise ModelError(
            f"{directory}: MC dropout needs states of a multiple of {BLOCK_SIZE}, not {spec.hidden_size}"
        )
    if spec.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{directory} is a {spec.architecture}; MC dropout supports {known}")


def _append_branch(graph: Any, spec: DraftSpec) -> None:
    writer = OnnxWriter(accuracy_level=0)  # of no matrix: copied ones keep theirs
    nodes, head = _behind_attention(graph, spec)
    sizes = [_attributes(node)["K"] for node in nodes if node.op_type == _MATRIX]
    rows = _copy_with_masks(writer, nodes, writer.split(DROPOUT_MASKS, sizes), head.input[0])
    _score_candidates(writer, graph, head, rows, spec)
    writer.extend(
        graph,
        inputs=[ValueInfo(DROPOUT_MASKS, "float32", ("samples", 1, sum(sizes)))],
        outputs=[
            ValueInfo(CANDIDATE_IDS, "int64", ("candidates",)),
            ValueInfo(CANDIDATE_LOGITS, "float32", ("samples", "candidates")),
        ],
    )


def _behind_attention(graph: Any, spec: DraftSpec) -> tuple[list[Any], Any]:
    """Returns the nodes between the last layer's second norm and the head, and the head."""
    known = {f"model.layers.{spec.num_layers - 1}.post_attention_layernorm.out"}
    nodes: list[Any] = []
    for node in graph.node:
        if known.isdisjoint(node.input):
            continue
        if _HEAD in node.output:
            return nodes, node
        nodes.append(node)
        known.update(filter(None, node.output))
    raise ModelError(f"{GRAPH_FILE} has no head {_HEAD!r}: export the draft again")


def _copy_with_masks(writer: OnnxWriter, nodes: Sequence[Any], masks: Iterable[str], result: str) -> str:
    """Adds copies of `nodes` whose matrices have masked inputs; returns the name of the copy of `result`."""
    masks = iter(masks)
    copies: dict[str, str] = {}
    for node in nodes:
        inputs = [copies.get(name, name) for name in node.input]
        if node.op_type == _MATRIX:  # [·, 1, size] times [num_samples, 1, size]
            writer.node("Mul", [inputs[0], next(masks)], [f"{inputs[0]}.masked"])
            inputs[0] += ".masked"
        outputs = [name and f"{name}.dropped" for name in node.output]
        copies |= dict(zip(node.output, outputs, strict=True))
        writer.node(node.op_type, inputs, outputs, node.domain, **_attributes(node))
    return copies[result]


def _score_candidates(writer: OnnxWriter, graph: Any, head: Any, rows: str, spec: DraftSpec) -> None:
    """Adds the head for the most probable ids only: for all ids it is the larger part of a small model.

    Without masks there are no candidates either, so that the branch takes no time.
    """
    packed, scales = head.input[1], "embedding.block_scales"
    if packed != "embedding.packed":
        scales = f"{head.input[2]}.blocks"
        graph.initializer.append(_with_last_axis(graph, head.input[2], scales))
    writer.constant("most_candidates", np.array([min(NUM_CANDIDATES, spec.num_tokens)], np.int64))
    writer.constant("flat_shape", np.array([-1], np.int64))
    writer.constant("rows_shape", np.array([-1, spec.hidden_size], np.int64))
    writer.node("Shape", [DROPOUT_MASKS], ["num_masks"], start=0, end=1)
    writer.node("Mul", ["num_masks", "most_candidates"], ["enough_candidates"])
    writer.node("Min", ["enough_candidates", "most_candidates"], ["num_candidates"])
    writer.node("TopK", ["probs", "num_candidates"], ["top_probs", "top_ids"], axis=-1)
    writer.node("Reshape", ["top_ids", "flat_shape"], [CANDIDATE_IDS])
    inputs = [packed, CANDIDATE_IDS, scales]
    attributes = {"bits": 4, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 2}
    writer.node("GatherBlockQuantized", inputs, ["candidate_blocks"], MICROSOFT, **attributes)
    writer.node("Reshape", ["candidate_blocks", "rows_shape"], ["candidate_table"])
    writer.node("Reshape", [rows, "rows_shape"], ["dropped_rows"])
    writer.node("Gemm", ["dropped_rows", "candidate_table"], [CANDIDATE_LOGITS], transB=1)


def _with_last_axis(graph: Any, name: str, new_name: str) -> Any:
    """Returns the constant `name` [rows, blocks] as [rows, blocks, 1], with the same bytes."""
    (found,) = (constant for constant in graph.initializer if constant.name == name)
    copy = type(found)()
    copy.CopyFrom(found)
    copy.name = new_name
    copy.dims.append(1)
    return copy


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _share_weights(graph: Any, graph_path: Path) -> None:
    """Point large constants at their bytes inside `draft.onnx`; those beside it are outside already.

    Numbers of four bytes stay where the file does not align them: a reader maps the file as it is.
    """
    with graph_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = 0
        for constant in graph.initializer:
            raw = constant.raw_data
            if len(raw) < _LEAST_SHARED_BYTES:
                continue
            start = data.find(raw, end)  # in the file's own order
            if start < 0:
                start = data.find(raw)
            else:
                end = start + len(raw)
            assert start >= 0, f"{constant.name} is not in {graph_path}"
            if start % (len(raw) // math.prod(constant.dims)) == 0:
                _refer(constant, graph_path.name, start, len(raw))


def _refer(constant: Any, location: str, start: int, num_bytes: int) -> None:
    from onnx import TensorProto

    constant.ClearField("raw_data")
    constant.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": start, "length": num_bytes}.items():
        entry = constant.external_data.add()
        entry.key, entry.value = key, str(value)
