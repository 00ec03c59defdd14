"""A small random INT4 draft, made without torch, and a fake target that shares its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.fakes import FakeBackend
from support.models import make_tokenizer

from outrider.common.models.fingerprint import num_tokens, tokenizer_fingerprint
from outrider.edge_client.drafting.export.exporter import export_draft

_HIDDEN, _HEADS, _KV_HEADS, _INTERMEDIATE, _LAYERS = 64, 4, 2, 96, 1


def make_tiny_draft(root: Path) -> Path:
    """Random Llama weights, exported; returns the draft's directory."""
    source = root / "source"
    make_tokenizer(source, 320)
    count = num_tokens(source / "tokenizer.json")
    rng = np.random.default_rng(7)
    head_dim = _HIDDEN // _HEADS
    shapes = {"model.embed_tokens.weight": (count, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (_HIDDEN,),
            prefix + "post_attention_layernorm.weight": (_HIDDEN,),
            prefix + "self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
            prefix + "self_attn.k_proj.weight": (_KV_HEADS * head_dim, _HIDDEN),
            prefix + "self_attn.v_proj.weight": (_KV_HEADS * head_dim, _HIDDEN),
            prefix + "self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
            prefix + "mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
    tensors = {
        name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, source / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": count,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    (source / "config.json").write_text(json.dumps(config))
    export_draft(source, root / "draft")
    return root / "draft"


def make_backend(draft_dir: Path) -> FakeBackend:
    tokenizer = draft_dir / "tokenizer.json"
    backend = FakeBackend(num_tokens=num_tokens(tokenizer), max_context=400)
    backend.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
    return backend
