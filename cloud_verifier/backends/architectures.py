"""The decoders that the paged forward computes correctly. Everything else is refused by name.

The packed forward has one kind of attention: softmax over the earlier tokens of the same sequence, all or those of a
window. A model with another kind would load and run, and be silently wrong, so its configuration is read before its
weights. What no configuration says is found by the first forward (`probes`): masks of a model's own, attention that is
not causal, other positions.
"""

from __future__ import annotations

from typing import Any

from outrider.common.errors import ModelError

# Positions enter these rotary embeddings through the longest position of the whole batch, so one session's
# text would depend on its neighbours.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
RECURRENT_MARKS = ("mamba", "rwkv", "recurrent", "xlstm", "linear_attention", "jamba", "zamba")
# Configuration keys that change the attention, where they are set to something other than None, 0 or False.
ATTENTION_MARKS = {
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "alibi": "ALiBi attention",
    "use_alibi": "ALiBi attention",
    "attn_layer_period": "attention in some layers only",
    "add_cross_attention": "cross-attention",
    "use_bidirectional_attention": "bidirectional attention",
}
SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", "attention", "global_attention", SLIDING)


def check_supported(config: Any, max_context: int) -> None:
    """Raises `ModelError` naming the model type and the reason unless the packed forward computes it."""
    reason = _unsupported_reason(config)
    if reason is None and any(window == 0 for window in layer_windows(config, max_context)):
        reason = "it has sliding layers, and its sliding_window is not given"
    if reason:
        raise ModelError(
            f"model type {config.model_type!r} is not supported as a target: {reason} "
            "(decoders such as Llama, Qwen2/3, Mistral, Gemma, GPT-NeoX and GPT-2 are)"
        )


def _unsupported_reason(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    names = [config.model_type.lower(), *sorted(kinds)]
    if any(mark in name for mark in RECURRENT_MARKS for name in names) or hasattr(config, "state_size"):
        return "it is recurrent (state-space or linear attention)"
    if others := sorted(kinds - set(LAYER_TYPES)):
        return f"it has layers of type {', '.join(others)}"
    for key, what in ATTENTION_MARKS.items():
        if getattr(config, key, None):
            return f"it uses {what} ({key})"
    ropes = _rope_types(getattr(config, "rope_parameters", None))
    for rope in BATCH_DEPENDENT_ROPE:
        if rope in ropes:
            return f"its rotary embedding ({rope}) depends on the longest sequence of a batch"
    return None


def layer_windows(config: Any, max_context: int) -> tuple[int | None, ...]:
    """Returns how many tokens each layer attends over: None where that is all of `max_context`, 0 where the
    configuration does not say."""
    num_layers, kinds = int(config.num_hidden_layers), getattr(config, "layer_types", None)
    window = int(getattr(config, "sliding_window", None) or getattr(config, "window_size", None) or 0)
    if kinds is None:
        is_used = window > 0 and getattr(config, "use_sliding_window", None) is not False
        # Qwen's: the first layers attend over everything.
        num_full = int(getattr(config, "max_window_layers", None) or 0) if is_used else num_layers
        kinds = [SLIDING if index >= num_full else "" for index in range(num_layers)]
    return tuple(window if kind == SLIDING and window < max_context else None for kind in kinds)


def _rope_types(parameters: Any) -> set[str]:
    """Returns the types in rope_parameters, which is one dict, or one dict per layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (parameters, *nested)}
