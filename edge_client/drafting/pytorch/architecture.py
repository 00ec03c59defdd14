"""Says which models of transformers the torch draft computes: decoders that take their attention from outside."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import num_embedded_tokens


def check_decoder(config: Any, model_class: Any, name: object) -> None:
    """Raises `ModelError`, which begins with `name`, for a model whose attention is not what the draft computes."""
    parameters = inspect.signature(model_class.forward).parameters if model_class else {}
    if not getattr(model_class, "_supports_attention_backend", False) or "logits_to_keep" not in parameters:
        raise ModelError(
            f"{name}: model type {config.model_type!r} is not a decoder that takes its attention from outside"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ModelError(f"{name} has layers of {others[0]}, which the torch draft does not compute")


def max_context(config: Any) -> int:
    """Returns the longest sequence of a configuration. Raises `ModelError` where it has none."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"the configuration of model type {config.model_type!r} has no max_position_embeddings")


def num_tokens(model: Any, tokenizer_json: Path) -> int:
    """Returns how many ids of a tokenizer a model has. Raises `ModelError` where it lacks some that are no special
    tokens."""
    return num_embedded_tokens(tokenizer_json, model.get_input_embeddings().weight.shape[0])
