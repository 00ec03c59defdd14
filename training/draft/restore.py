"""A draft's INT4 graph back in Hugging Face form, to train on: what is committed is the graph alone.

A quantised weight quantises to itself, so nothing is lost but what INT4 had rounded away before.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE, Float32, QuantizedMatrix
from outrider.edge_client.drafting.spec import DEFAULT_PRECISION, GRAPH_FILE, DraftSpec, read_spec
from outrider.training.common.model import ModelConfig, create_model, save_model
from outrider.training.draft.drafts import copy_tokenizer

RECORD = "training.json"


def is_graph(directory: Path) -> bool:
    """Returns whether a directory holds an exported draft."""
    return (directory / GRAPH_FILE).is_file()


def restore_draft(graph_dir: Path, out: Path) -> None:
    """Write the draft of `graph_dir`, made by our recipe, to `out` in float32, and the record of its training
    beside it. Raises ModelError for a damaged directory, ValueError for another recipe's draft.
    """
    import onnx
    from onnx import numpy_helper

    spec = read_spec(graph_dir)
    if spec.precision != DEFAULT_PRECISION:
        raise ValueError(f"{graph_dir} was exported in {spec.precision}: give its Hugging Face directory")
    graph = onnx.load(graph_dir / GRAPH_FILE).graph
    constants = {constant.name: numpy_helper.to_array(constant) for constant in graph.initializer}
    weights = _weights(constants, spec)
    model = create_model(_shape(weights, spec))
    expected = {name: param.shape for name, param in model.named_parameters()}
    if spec.architecture != "llama" or expected != {name: weight.shape for name, weight in weights.items()}:
        raise ValueError(f"{graph_dir} is no draft of this recipe: give its Hugging Face directory")
    model.load_state_dict(weights, strict=False)  # a tied head has a name of its own there
    save_model(model, out, torch.float32)
    copy_tokenizer(graph_dir, out)
    record = graph_dir.parent / "training-draft.json"
    if record.is_file():
        shutil.copyfile(record, out / RECORD)


def _shape(weights: dict[str, torch.Tensor], spec: DraftSpec) -> ModelConfig:
    layer = "model.layers.0"
    return ModelConfig(
        spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=weights[f"{layer}.self_attn.o_proj.weight"].size(1) // spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn_size=weights[f"{layer}.mlp.down_proj.weight"].size(1),
        tied="lm_head.weight" not in weights,
        vocab_size=spec.num_tokens,
        context=spec.max_context,
    )


def _weights(constants: dict[str, Any], spec: DraftSpec) -> dict[str, torch.Tensor]:
    """Returns parameters by name: matrices dequantised, projections that the graph has side by side apart
    again."""
    found = {"model.embed_tokens.weight": _matrix(constants, "embedding.packed", "embedding.block_scales")}
    if "lm_head.packed" in constants:
        found["lm_head.weight"] = _matrix(constants, "lm_head.packed", "lm_head.scales")
    for name, constant in constants.items():
        if name.endswith("norm.weight"):
            found[name] = constant.copy()
        elif name.startswith("model.") and name.endswith(".packed"):
            stem = name.removesuffix(".packed")
            prefix, _, joined = stem.rpartition(".")
            parts = [f"{part}_proj" for part in joined.removesuffix("_proj").split("_proj_")]
            matrix = _matrix(constants, name, f"{stem}.scales")
            for part, rows in zip(parts, _split(matrix, parts, spec), strict=True):
                found[f"{prefix}.{part}.weight"] = rows
    return {name: torch.from_numpy(weight) for name, weight in found.items()}


def _split(matrix: Float32, parts: list[str], spec: DraftSpec) -> list[Float32]:
    if parts != ["q_proj", "k_proj", "v_proj"]:
        return np.split(matrix, len(parts))
    kv_size = spec.num_kv_heads * spec.head_dim
    return np.split(matrix, [len(matrix) - 2 * kv_size, len(matrix) - kv_size])


def _matrix(constants: dict[str, Any], packed: str, scales: str) -> Float32:
    codes = constants[packed].reshape(len(constants[packed]), -1, BLOCK_SIZE // 2)
    return QuantizedMatrix(codes, constants[scales].reshape(codes.shape[:2])).dequantize()
