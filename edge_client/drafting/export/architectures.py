"""Describes the architectures that can be exported: what their tensors are called, which pieces a layer consists of.

A new decoder of known pieces is a new entry of `ARCHITECTURES`; `graph` has the pieces, `weights` the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes one architecture of Hugging Face.

    `names` maps parts to tensor names without `.weight`, with `{}` for the layer. `attention` names one tensor for
    queries, keys and values where `layout` says how they share it: their rows one after the other, or head by head.
    """

    name: str
    names: Mapping[str, str]
    layout: Literal["apart", "rows", "heads"] = "apart"
    is_transposed: bool = False  # matrices are [inputs, outputs] (GPT-2's Conv1D)
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # added to the weights of norms
    block: Literal["sequential", "parallel"] = (
        "sequential"  # parallel: attention and MLP read the same states
    )
    is_gated: bool = True  # the MLP
    has_positions: bool = False  # a learned embedding of positions, in place of rotation
    is_embedding_scaled: bool = False  # by the root of the hidden size
    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json, where it calls them otherwise
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where config.json leaves them out
    window_rule: Literal["none", "all", "from", "pattern"] = (
        "none"  # which layers slide, without `layer_types`
    )
    activations: Mapping[str, str] = field(default_factory=dict)  # names that mean another function here


_LAYER = "model.layers.{}."
_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": _LAYER + "input_layernorm",
    "mlp_norm": _LAYER + "post_attention_layernorm",
    "q": _LAYER + "self_attn.q_proj",
    "k": _LAYER + "self_attn.k_proj",
    "v": _LAYER + "self_attn.v_proj",
    "o": _LAYER + "self_attn.o_proj",
    "gate": _LAYER + "mlp.gate_proj",
    "up": _LAYER + "mlp.up_proj",
    "down": _LAYER + "mlp.down_proj",
}
_HEAD_NORMS = {"q_norm": _LAYER + "self_attn.q_norm", "k_norm": _LAYER + "self_attn.k_norm"}
_LLAMA = Architecture("llama", _LLAMA_NAMES)
_QWEN2 = replace(_LLAMA, name="qwen2", window_rule="from")
_GEMMA = replace(
    _LLAMA,
    name="gemma",
    norm_offset=1.0,
    is_embedding_scaled=True,
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
    activations={"gelu": "gelu_pytorch_tanh"},  # early files say gelu; their models were trained with tanh
)
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    names=_LLAMA_NAMES
    | {
        "attention_out_norm": _LAYER + "post_attention_layernorm",
        "mlp_norm": _LAYER + "pre_feedforward_layernorm",
        "mlp_out_norm": _LAYER + "post_feedforward_layernorm",
    },
    keys={"hidden_act": "hidden_activation"},
    defaults=dict(_GEMMA.defaults)
    | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"sliding_window": 4096, "sliding_window_pattern": 2},
    window_rule="pattern",
)
_PHI3 = replace(
    _LLAMA,
    name="phi3",
    names=_LLAMA_NAMES | {"attention": _LAYER + "self_attn.qkv_proj", "gate_up": _LAYER + "mlp.gate_up_proj"},
    layout="rows",
    window_rule="all",
)
_NEOX_LAYER, _GPT2_LAYER = "gpt_neox.layers.{}.", "transformer.h.{}."
_NEOX = Architecture(
    "gpt_neox",
    {
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "input_norm": _NEOX_LAYER + "input_layernorm",
        "mlp_norm": _NEOX_LAYER + "post_attention_layernorm",
        "attention": _NEOX_LAYER + "attention.query_key_value",
        "o": _NEOX_LAYER + "attention.dense",
        "up": _NEOX_LAYER + "mlp.dense_h_to_4h",
        "down": _NEOX_LAYER + "mlp.dense_4h_to_h",
    },
    layout="heads",
    norm="layer",
    block="parallel",
    is_gated=False,
    keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    defaults={"partial_rotary_factor": 0.25, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
)
_PHI = Architecture(
    "phi",
    {
        "embedding": "model.embed_tokens",
        "norm": "model.final_layernorm",
        "head": "lm_head",
        "input_norm": _LAYER + "input_layernorm",  # of the MLP too
        "q": _LAYER + "self_attn.q_proj",
        "k": _LAYER + "self_attn.k_proj",
        "v": _LAYER + "self_attn.v_proj",
        "o": _LAYER + "self_attn.dense",
        "up": _LAYER + "mlp.fc1",
        "down": _LAYER + "mlp.fc2",
    },
    norm="layer",
    block="parallel",
    is_gated=False,
    defaults={"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
)
_GPT2 = Architecture(
    "gpt2",
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "input_norm": _GPT2_LAYER + "ln_1",
        "mlp_norm": _GPT2_LAYER + "ln_2",
        "attention": _GPT2_LAYER + "attn.c_attn",
        "o": _GPT2_LAYER + "attn.c_proj",
        "up": _GPT2_LAYER + "mlp.c_fc",
        "down": _GPT2_LAYER + "mlp.c_proj",
    },
    layout="rows",
    is_transposed=True,
    norm="layer",
    is_gated=False,
    has_positions=True,
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": replace(_LLAMA, name="mistral", window_rule="all"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(_QWEN2, name="qwen3", names=_LLAMA_NAMES | _HEAD_NORMS),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        name="gemma3",
        names=dict(_GEMMA2.names) | _HEAD_NORMS,
        defaults=dict(_GEMMA2.defaults)
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 6}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    ),
    "GPTNeoXForCausalLM": _NEOX,
    "GPT2LMHeadModel": _GPT2,
    "PhiForCausalLM": _PHI,
    "Phi3ForCausalLM": _PHI3,
}
"""By the name under `architectures` in config.json."""
