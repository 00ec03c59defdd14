"""Small random models of every architecture that `draft export` knows, and the probabilities of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

NUM_TOKENS = 320
_SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 32}
_GPT2: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 3}
_WINDOWS = ["sliding_attention", "full_attention"]
_ODD: dict[str, Any] = {"hidden_size": 60, "intermediate_size": 100, "num_attention_heads": 3}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "mistral, window of 8": (MistralConfig, _GROUPED | {"head_dim": 16, "sliding_window": 8}),
    "qwen2, second layer slides": (
        Qwen2Config,
        _GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, _GROUPED | {"head_dim": 32}),
    "gemma": (GemmaConfig, _GEMMA),
    "gemma2, window of 8": (Gemma2Config, _GEMMA | {"sliding_window": 8, "layer_types": _WINDOWS}),
    "gemma3, window of 8": (Gemma3TextConfig, _GEMMA | {"sliding_window": 8, "layer_types": _WINDOWS}),
    "gpt_neox": (GPTNeoXConfig, _SIZES),
    "gpt_neox, one after the other": (GPTNeoXConfig, _SIZES | {"use_parallel_residual": False}),
    "gpt2": (GPT2Config, _GPT2),
    "phi": (PhiConfig, _GROUPED),
    "phi3, window of 8": (Phi3Config, _GROUPED | {"sliding_window": 8}),
    # 60 and 100 are no multiples of 32, heads of 20 none of 16
    "llama, odd sizes": (LlamaConfig, _SIZES | _ODD),
    "gpt_neox, odd sizes": (GPTNeoXConfig, _SIZES | _ODD | {"hidden_size": 120}),
    "gpt2, odd sizes": (GPT2Config, _GPT2 | {"n_embd": 60, "n_head": 5, "n_inner": 100}),
    "phi, odd sizes": (PhiConfig, _SIZES | _ODD),
}


def make_dir(path: Path, kind: str) -> Path:
    """Writes a Hugging Face directory of one of `KINDS`."""
    config_class, fields = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.2 * min(weight.shape) ** -0.5)
            elif "bias" in name:
                weight.normal_(0, 0.3)
            else:
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
    model.save_pretrained(path)
    vocabulary = {f"w{index}": index for index in range(NUM_TOKENS)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


def source_probs(hf_dir: Path, ids: list[int]) -> np.ndarray:
    """Returns the probabilities of transformers after each id, [len(ids), vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1).numpy()


def export_probs(out_dir: Path, ids: list[int]) -> np.ndarray:
    """Returns the probabilities of an export after each id, fed one at a time, as a draft is."""
    with OnnxDraftModel.open(out_dir) as model:
        runner, _ = model.sequence(SamplingParams(temperature=1.0)).parts
        return np.stack([runner.feed([each], at).probs[0].copy() for at, each in enumerate(ids)])
