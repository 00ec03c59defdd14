"""The configurations that our own decoders compute: Llama, Mistral, Qwen2, Qwen3 and Gemma 2, from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from outrider.cloud_verifier.backends.architectures import SLIDING, layer_windows

# Their default where config.json has no `head_dim`: None is hidden_size / num_attention_heads.
DEFAULT_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128, "gemma2": 256}
ROPE_TYPES = ("default", "linear", "llama3")
# By their names in config.json.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# A configuration without these fields is left to transformers, which knows their defaults.
_NEEDED = {
    "mistral": ("sliding_window",),
    "gemma2": (
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
}
_OF_QWEN_WINDOWS = ("sliding_window", "max_window_layers")  # where it has windows at all


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Holds what the decoder needs of a config.json, under the names it has there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta and the type's own
    windows: tuple[int | None, ...]  # of each layer: tokens that it attends over, None: all
    activation: str = "silu"  # or "gelu_tanh": of the gate
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: by that of head_dim
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    eos_token_id: Any = None

    @property
    def has_output_bias(self) -> bool:
        """Returns whether the projection of the attention's output has a bias: Qwen2's never has."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def has_head_norms(self) -> bool:
        """Returns whether queries and keys are normalised, each head by itself."""
        return self.model_type == "qwen3"

    @property
    def is_gemma(self) -> bool:
        """Returns whether norms multiply by 1 + weight, each part of a layer has a norm after it too, and embeddings
        are multiplied by the root of their size."""
        return self.model_type == "gemma2"


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a config.json with what transformers would add, in its newest form.

    None for a model type, a rotary embedding or an option that our own decoder does not compute, and where a
    field without an evident default is missing.
    """
    kind = raw["model_type"]
    if kind not in DEFAULT_HEAD_DIM or any(name not in raw for name in _needed(raw)):
        return None
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    fields = {
        **raw,
        "rope_parameters": rope,
        "head_dim": raw.get("head_dim") or DEFAULT_HEAD_DIM[kind],
        "num_key_value_heads": raw.get("num_key_value_heads") or raw.get("num_attention_heads"),
        "attention_bias": kind == "qwen2" or (kind != "mistral" and bool(raw.get("attention_bias"))),
        "mlp_bias": kind == "llama" and bool(raw.get("mlp_bias")),
    }
    if kind in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = bool(raw.get("use_sliding_window"))
    if kind == "gemma2":
        kinds = [SLIDING if index % 2 == 0 else "full_attention" for index in range(raw["num_hidden_layers"])]
        fields["layer_types"] = raw.get("layer_types") or kinds
        fields["hidden_act"] = raw.get("hidden_activation") or "gelu_pytorch_tanh"
        fields.setdefault("tie_word_embeddings", True)
    return fields


def _needed(raw: Mapping[str, Any]) -> tuple[str, ...]:
    is_qwen = raw["model_type"] in ("qwen2", "qwen3")
    return (
        _OF_QWEN_WINDOWS if is_qwen and raw.get("use_sliding_window") else _NEEDED.get(raw["model_type"], ())
    )


def make_decoder_config(fields: Mapping[str, Any]) -> DecoderConfig | None:
    """Returns the configuration of `with_defaults`, None where our own decoder does not compute it.

    Raises ValueError, TypeError or KeyError for a field of another type, one that is missing, and sizes that cannot be.
    """
    rope = fields["rope_parameters"]
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    is_ours = (
        rope["rope_type"] in ROPE_TYPES
        and partial in (None, 1, 1.0)
        and fields.get("hidden_act", "silu") in ACTIVATIONS
        and not fields.get("quantization_config")
        and all(fields.get(name) is not None for name in _REQUIRED)
    )
    if not is_ours:
        return None
    sizes = {name: int(fields[name]) for name in _REQUIRED}
    head_dim = int(fields["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"])
    if min(*sizes.values(), head_dim) < 1 or head_dim % 2:
        raise ValueError(f"sizes must be positive and head_dim even: {sizes}, head_dim {head_dim}")
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
    _check_rope(rope)
    return DecoderConfig(
        model_type=fields["model_type"],
        **sizes,
        head_dim=head_dim,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=fields["attention_bias"],
        mlp_bias=fields["mlp_bias"],
        rope_parameters=rope,
        windows=layer_windows(SimpleNamespace(**fields), sizes["max_position_embeddings"]),
        activation=ACTIVATIONS[fields.get("hidden_act", "silu")],
        query_pre_attn_scalar=fields.get("query_pre_attn_scalar"),
        attn_logit_softcapping=fields.get("attn_logit_softcapping"),
        final_logit_softcapping=fields.get("final_logit_softcapping"),
        eos_token_id=fields.get("eos_token_id"),
    )


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError where a rotary embedding's frequencies cannot be computed."""
    of_llama3 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    needed = {"default": (), "linear": ("factor",), "llama3": of_llama3}[rope["rope_type"]]
    if missing := [name for name in needed if rope.get(name) is None]:
        raise ValueError(f"rotary embedding {rope['rope_type']} has no {missing[0]}")
    numbers = {name: float(rope[name]) for name in ("rope_theta", *needed)}
    if not all(0 < number < math.inf for number in numbers.values()):
        raise ValueError(f"the rotary embedding's numbers must be positive: {numbers}")
    if rope["rope_type"] == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError("low_freq_factor is not below high_freq_factor")


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
