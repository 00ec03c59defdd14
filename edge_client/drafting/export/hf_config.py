"""Reads the `config.json` of a Hugging Face decoder for the graph builder, or rejects it with a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.edge_client.drafting.export.architectures import ARCHITECTURES, Architecture

ROPE_TYPES = ("default", "linear", "llama3")
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Describes a decoder of an architecture of `ARCHITECTURES`: its sizes, and what each layer's attention sees."""

    shape: Architecture
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    is_tied: bool
    is_parallel: bool  # attention and MLP of a layer read the same states
    activation: str  # a value of `ACTIVATIONS`
    rope: Mapping[str, Any]  # empty: none; by layer type where they differ
    rotary_share: float  # of a head's dimensions, the first ones
    layer_types: tuple[str, ...]  # FULL or SLIDING
    window: int  # of sliding layers: how many tokens each sees, itself included
    attention_scale: float
    attention_softcap: float  # 0: none
    logit_softcap: float
    eos_token_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        """Returns the architecture's name."""
        return self.shape.name

    @property
    def padded_head_dim(self) -> int:
        """Returns the size of a head in the graph: onnxruntime's attention takes multiples of 8, rotated ones of 16."""
        step = 8 if self.shape.has_positions else 16
        return -(-self.head_dim // step) * step

    @property
    def rotary_dim(self) -> int:
        """Returns how many of a head's dimensions are rotated."""
        return 0 if self.shape.has_positions else int(self.head_dim * self.rotary_share)

    def rope_of(self, layer_type: str) -> Mapping[str, Any]:
        """Returns the rotation of layers of a type."""
        found: Mapping[str, Any] = self.rope.get(layer_type, self.rope)
        return found

    def inverse_frequencies(self, layer_type: str = FULL) -> NDArray[np.float64]:  # [rotary_dim // 2]
        """Returns the rotary frequencies [rotary_dim // 2] in radians a position."""
        rope = self.rope_of(layer_type)
        exponents = np.arange(0, self.rotary_dim, 2) / self.rotary_dim
        frequencies = 1.0 / float(rope["rope_theta"]) ** exponents
        return _scale_frequencies(frequencies, rope)


def read_config(hf_dir: Path) -> DecoderConfig:
    """Raises `ModelError` with one line: what is missing, or which architecture is not supported."""
    raw = _read_json(hf_dir / "config.json")
    shape = _architecture(raw, hf_dir)
    fields = _Fields(raw, shape)
    _refuse_unsupported(fields, hf_dir)
    try:
        config = _decoder_config(fields, shape, hf_dir)
    except KeyError as error:
        raise ModelError(f"{hf_dir}/config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{hf_dir}/config.json: {error}") from error
    _check_sizes(config, hf_dir)
    return config


class _Fields:
    """Reads config.json by Llama's keys: an architecture may call them otherwise, and leave out its defaults."""

    def __init__(self, raw: Mapping[str, Any], shape: Architecture) -> None:
        self.raw = raw
        self._shape = shape

    def __getitem__(self, key: str) -> Any:
        own_key = self._shape.keys.get(key, key)
        for each in (own_key, key):
            if each in self.raw:
                return self.raw[each]
        if key in self._shape.defaults:
            return self._shape.defaults[key]
        raise KeyError(own_key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value, or a default where config.json and its architecture have none or null."""
        try:
            value = self[key]
        except KeyError:
            return default
        return default if value is None else value


def _decoder_config(fields: _Fields, shape: Architecture, hf_dir: Path) -> DecoderConfig:
    hidden_size, num_heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
    num_layers = int(fields["num_hidden_layers"])
    head_dim = int(fields.get("head_dim") or hidden_size // num_heads)
    inner_size = fields.get("intermediate_size") if shape.has_positions else fields["intermediate_size"]
    norm_eps = fields.get("rms_norm_eps", 1e-6) if shape.norm == "rms" else fields["layer_norm_eps"]
    rope = {} if shape.has_positions else _rope(fields, hf_dir)
    return DecoderConfig(
        shape=shape,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(4 * hidden_size if inner_size is None else inner_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        max_context=int(fields["max_position_embeddings"]),
        norm_eps=float(norm_eps),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        is_parallel=shape.block == "parallel" and bool(fields.get("use_parallel_residual", True)),
        activation=_activation(fields, shape, hf_dir),
        rope=rope,
        rotary_share=_rotary_share(fields, rope),
        layer_types=_layer_types(fields, shape, num_layers, hf_dir),
        window=int(fields.get("sliding_window", 0)),
        attention_scale=float(fields.get("query_pre_attn_scalar", head_dim)) ** -0.5,
        attention_softcap=float(fields.get("attn_logit_softcapping", 0.0)),
        logit_softcap=float(fields.get("final_logit_softcapping", 0.0)),
        eos_token_ids=_eos_token_ids(fields.raw, hf_dir),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: not a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    return raw


def _architecture(raw: Mapping[str, Any], hf_dir: Path) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or raw.get("model_type", "unnamed")
    raise ModelError(f"{hf_dir} is a {found}; export supports {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: _Fields, hf_dir: Path) -> None:
    if fields.raw.get("quantization_config"):
        raise ModelError(f"{hf_dir} is already quantised; export needs the original weights")
    refused = {
        "qk_layernorm": (True, "norms of queries and keys (qk_layernorm)"),
        "use_bidirectional_attention": (True, "attention to later tokens (use_bidirectional_attention)"),
        "add_cross_attention": (True, "cross-attention (add_cross_attention)"),
        "scale_attn_weights": (False, "unscaled attention (scale_attn_weights)"),
        "scale_attn_by_inverse_layer_idx": (
            True,
            "attention scaled by layer (scale_attn_by_inverse_layer_idx)",
        ),
    }
    for key, (value, what) in refused.items():
        if fields.raw.get(key) is value:
            raise ModelError(f"{hf_dir} uses {what}, which export does not support")


def _activation(fields: _Fields, shape: Architecture, hf_dir: Path) -> str:
    name = str(fields.get("hidden_act", "silu"))
    name = shape.activations.get(name, name)
    if name not in ACTIVATIONS:
        raise ModelError(f"{hf_dir} uses the activation {name!r}; export supports {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _layer_types(fields: _Fields, shape: Architecture, num_layers: int, hf_dir: Path) -> tuple[str, ...]:
    """Returns the types in config.json, or those that its architecture had before they were written there."""
    if types := fields.get("layer_types"):
        if others := sorted(set(types) - {FULL, SLIDING}):
            raise ModelError(f"{hf_dir} has layers of {others[0]}, which export does not support")
        return tuple(types)
    window = fields.get("sliding_window")
    if window is None or shape.window_rule == "none" or fields.raw.get("use_sliding_window") is False:
        return (FULL,) * num_layers
    if shape.window_rule == "from":
        if not fields.raw.get("use_sliding_window"):
            return (FULL,) * num_layers
        first = int(fields.get("max_window_layers", 28))
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    if shape.window_rule == "pattern":
        every = int(fields.raw.get("_sliding_window_pattern") or fields["sliding_window_pattern"])
        return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(num_layers))
    return (SLIDING,) * num_layers


def _rope(fields: _Fields, hf_dir: Path) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = fields.get("rope_theta", 10_000.0)
    if {FULL, SLIDING} & set(raw):
        return {kind: _checked_rope(dict(rope), theta, hf_dir) for kind, rope in raw.items()}
    rope = _checked_rope(dict(raw), theta, hf_dir)
    if (local_theta := fields.get("rope_local_base_freq")) is not None:  # Gemma 3 before transformers 5
        return {FULL: rope, SLIDING: {"rope_theta": local_theta, "rope_type": "default"}}
    return rope


def _checked_rope(rope: dict[str, Any], theta: float, hf_dir: Path) -> dict[str, Any]:
    rope.setdefault("rope_theta", theta)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        kinds = ", ".join(ROPE_TYPES)
        raise ModelError(f"{hf_dir} uses rope scaling {rope['rope_type']!r}; export supports {kinds}")
    return rope


def _rotary_share(fields: _Fields, rope: Mapping[str, Any]) -> float:
    share = rope.get("partial_rotary_factor")
    return float(fields.get("partial_rotary_factor", 1.0) if share is None else share)


def _scale_frequencies(frequencies: NDArray[np.float64], rope: Mapping[str, Any]) -> NDArray[np.float64]:
    if rope["rope_type"] == "default":
        return frequencies
    scaled = frequencies / float(rope["factor"])
    if rope["rope_type"] == "linear":
        return scaled
    # llama3: long wavelengths are scaled, short ones kept, those between interpolated.
    context = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    share = np.clip((context * frequencies / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return (1 - share) * scaled + share * frequencies


def read_eos_token_ids(hf_dir: Path) -> tuple[int, ...]:
    """Returns the end-of-text ids of a model directory; none where it has no config.json. Raises
    `ModelError`."""
    if not (hf_dir / "config.json").exists():
        return ()
    try:
        return _eos_token_ids(_read_json(hf_dir / "config.json"), hf_dir)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{hf_dir}/config.json: {error}") from error


def _eos_token_ids(raw: Mapping[str, Any], hf_dir: Path) -> tuple[int, ...]:
    """Returns the end-of-text ids; generation_config.json has more of them than config.json, where it
    exists."""
    generation = hf_dir / "generation_config.json"
    ids = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def _check_sizes(config: DecoderConfig, hf_dir: Path) -> None:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
    }
    for name, size in sizes.items():
        if size <= 0:
            raise ModelError(f"{hf_dir}: {name} is {size}")
    if config.num_kv_heads <= 0 or config.num_heads % config.num_kv_heads:
        raise ModelError(f"{hf_dir}: {config.num_heads} heads do not divide into {config.num_kv_heads}")
    if config.rotary_dim % 2:
        raise ModelError(f"{hf_dir}: {config.rotary_dim} rotated dimensions of a head are not pairs")
    if "q_norm" in config.shape.names and config.padded_head_dim != config.head_dim:
        raise ModelError(
            f"{hf_dir}: head_dim is {config.head_dim}; export needs a multiple of 16 where queries are normalised"
        )
    if len(config.layer_types) != config.num_layers:
        raise ModelError(f"{hf_dir}: layer_types has {len(config.layer_types)} of {config.num_layers} layers")
    if SLIDING in config.layer_types and config.window < 1:
        raise ModelError(f"{hf_dir}: sliding_window is {config.window}")
