"""Small random Hugging Face directories, and what they compute once their weights are INT4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outrider.edge_client.drafting.export.quantize import fake_quantize

_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 3,
}


def make_hf_dir(path: Path, kind: str, *, num_tokens: int | None = None, **changes: Any) -> Path:
    """bfloat16 safetensors with a word-level tokenizer of `num_tokens` (default: the vocabulary)."""
    torch.manual_seed(0)
    config = _CONFIGS[kind](**(_SIZES | changes))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
            elif "bias" in name:
                weight.normal_(0, 0.3)
            else:
                weight.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(path, num_tokens or config.vocab_size)
    return path


def write_tokenizer(path: Path, num_tokens: int) -> None:
    vocab = {f"w{i}": i for i in range(num_tokens)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(path / "tokenizer.json"))


def reference_probs(
    hf_dir: Path, token_ids: list[int], num_tokens: int, first_layers: int | None = None
) -> np.ndarray:
    """What `reference_model` says: `[len(token_ids), num_tokens]`."""
    model = reference_model(hf_dir, first_layers)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :, :num_tokens]
        return torch.softmax(logits.double(), dim=-1).numpy()


def reference_model(hf_dir: Path, first_layers: int | None = None) -> Any:
    """transformers in float32 with dequantised INT4 matrices."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    del model.model.layers[first_layers or len(model.model.layers) :]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(fake_quantize(weight.numpy())))
    return model


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def make_chains_only(directory: Path) -> None:
    """Turns an exported draft into what releases before trees exported (format version 3)."""
    import onnx
    from onnx import numpy_helper

    path = directory / "draft.onnx"
    model = onnx.load(path)
    graph = model.graph
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[9:]
        node.input[:] = ["last_index" if name == "rows" else name for name in node.input]
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "last_index"))
    kept = [each for each in graph.input if each.name not in ("position_ids", "attention_bias", "rows")]
    del graph.input[:]
    graph.input.extend(kept)
    for output in graph.output:
        first = output.type.tensor_type.shape.dim[0]
        if first.dim_param == "k":
            first.dim_value = 1
    onnx.save(model, path)
    files = json.loads((directory / "draft.json").read_text())["files"]
    edit_json(directory / "draft.json", format_version=3, files=files | {path.name: path.stat().st_size})
