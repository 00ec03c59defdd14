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
from outrider.edge_client.drafting.export.quantize import BLOCK_SIZE

SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Describes a pre-norm decoder with rotary grouped-query attention and a gated SiLU MLP."""

    architecture: str  # "llama", "qwen2", "qwen3"
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    is_tied: bool
    rope: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]

    def inverse_frequencies(self) -> NDArray[np.float64]:  # [head_dim // 2], radians a position
        """Returns the rotary frequencies [head_dim // 2] in radians a position."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        frequencies = 1.0 / float(self.rope["rope_theta"]) ** exponents
        return _scale_frequencies(frequencies, self.rope)


def read_config(hf_dir: Path) -> DecoderConfig:
    """Raises `ModelError` with one line: what is missing, or which architecture is not supported."""
    raw = _read_json(hf_dir / "config.json")
    architecture = _architecture(raw, hf_dir)
    _refuse_unsupported(raw, hf_dir)
    try:
        config = DecoderConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            max_context=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            rope=_rope(raw, hf_dir),
            eos_token_ids=_eos_token_ids(raw, hf_dir),
        )
    except KeyError as error:
        raise ModelError(f"{hf_dir}/config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{hf_dir}/config.json: {error}") from error
    _check_sizes(config, hf_dir)
    return config


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


def _architecture(raw: Mapping[str, Any], hf_dir: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED:
            return SUPPORTED[name]
    found = ", ".join(map(str, names)) or raw.get("model_type", "unnamed")
    raise ModelError(f"{hf_dir} is a {found}; export supports {', '.join(SUPPORTED)}")


def _refuse_unsupported(raw: Mapping[str, Any], hf_dir: Path) -> None:
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if raw.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise ModelError(f"{hf_dir} uses sliding-window attention, which export does not support")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{hf_dir} uses the activation {raw['hidden_act']!r}; export supports 'silu'")
    if raw.get("quantization_config"):
        raise ModelError(f"{hf_dir} is already quantised; export needs the original weights")


def _rope(raw: Mapping[str, Any], hf_dir: Path) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        kinds = ", ".join(ROPE_TYPES)
        raise ModelError(f"{hf_dir} uses rope scaling {rope['rope_type']!r}; export supports {kinds}")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{hf_dir} rotates part of each head ({partial}), which export does not support")
    return rope


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
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size <= 0 or size % BLOCK_SIZE:
            raise ModelError(f"{hf_dir}: {name} is {size}; INT4 needs a multiple of {BLOCK_SIZE}")
    if config.head_dim % 16:
        raise ModelError(f"{hf_dir}: head_dim is {config.head_dim}; export needs a multiple of 16")
    if config.num_kv_heads <= 0 or config.num_heads % config.num_kv_heads:
        raise ModelError(f"{hf_dir}: {config.num_heads} heads do not divide into {config.num_kv_heads}")
