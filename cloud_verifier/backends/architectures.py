"""The decoders that the paged forward computes correctly. Everything else is refused by name.

The packed forward has one kind of attention: softmax over all earlier tokens of the same sequence. A model
with another kind would load and run, and be silently wrong, so its configuration is read before its weights.
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
    "attn_logit_softcapping": "soft-capped attention",
    "attention_chunk_size": "chunked attention",
    "alibi": "ALiBi attention",
    "use_alibi": "ALiBi attention",
    "attn_layer_period": "attention in some layers only",
    "add_cross_attention": "cross-attention",
    "use_bidirectional_attention": "bidirectional attention",
}
FULL_LAYER_TYPES = ("full_attention", "attention", "global_attention")


def check_supported(config: Any, max_context: int) -> None:
    """Raises `ModelError` naming the model type and the reason unless the decoder is a full-attention one."""
    reason = _unsupported_reason(config, max_context)
    if reason:
        raise ModelError(
            f"model type {config.model_type!r} is not supported as a target: {reason} "
            "(full-attention decoders such as Llama, Qwen2/3, GPT-NeoX and GPT-2 are)"
        )


def _unsupported_reason(config: Any, max_context: int) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    # Recurrent before sliding-window: hybrids have both, and the recurrence is the harder obstacle.
    names = [config.model_type.lower(), *sorted(kinds)]
    if any(mark in name for mark in RECURRENT_MARKS for name in names) or hasattr(config, "state_size"):
        return "it is recurrent (state-space or linear attention)"
    window = _sliding_window(config, kinds)
    if window is not None and window < max_context:
        return f"it attends over a sliding window of {window} tokens"
    others = sorted(kinds - set(FULL_LAYER_TYPES) - {"sliding_attention"})
    if others:
        return f"it has layers of type {', '.join(others)}"
    for key, what in ATTENTION_MARKS.items():
        if getattr(config, key, None):
            return f"it uses {what} ({key})"
    ropes = _rope_types(getattr(config, "rope_parameters", None))
    for rope in BATCH_DEPENDENT_ROPE:
        if rope in ropes:
            return f"its rotary embedding ({rope}) depends on the longest sequence of a batch"
    return None


def _sliding_window(config: Any, kinds: set[str]) -> int | None:
    if kinds and "sliding_attention" not in kinds:
        return None
    if getattr(config, "use_sliding_window", None) is False:
        return None
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if window is None:
        return 0 if "sliding_attention" in kinds else None
    return int(window)


def _rope_types(parameters: Any) -> set[str]:
    """Returns the types in rope_parameters, which is one dict, or one dict per layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (parameters, *nested)}
