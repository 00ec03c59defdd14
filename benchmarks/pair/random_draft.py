"""Drafts of a public model's shape with random weights: what a run costs needs no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from outrider.edge_client.drafting.export.exporter import export_draft

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {  # Qwen2.5-0.5B
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
}


def export_random_draft(scratch: Path, shape: str) -> Path:
    """Writes about 1.3 GB below `scratch` for half a billion parameters; returns the draft's directory."""
    config = SHAPES[shape]
    hf_dir, out_dir = scratch / "hf", scratch / "draft"
    hf_dir.mkdir()
    (hf_dir / "config.json").write_text(json.dumps(config))
    tokens = {f"w{i}": i for i in range(config["vocab_size"])}
    (hf_dir / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": tokens}}))
    _write_weights(hf_dir / "model.safetensors", _tensor_shapes(config))
    export_draft(hf_dir, out_dir)
    (hf_dir / "model.safetensors").unlink()
    return out_dir


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in {"q_proj": hidden, "k_proj": kv, "v_proj": kv}.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = (size, hidden)
            shapes[f"{prefix}.self_attn.{name}.bias"] = (size,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """bfloat16 safetensors, tensor by tensor."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = rng.standard_normal(shape, np.float32)
            values = values / np.sqrt(shape[1]) if len(shape) == 2 else 1 + 0.1 * values
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
