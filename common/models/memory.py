"""How much memory a target takes: its weights, the KV of a token, and a step beside them."""

from __future__ import annotations

# Of a number: 4 bits, a byte of scale for 64 of them, and 4 bytes for 256 scales (double quantisation).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
FP8_SCALE_BYTES = 2  # of FP8's keys, and of its values: one float16 for a token and KV head
# Of a row of logits, an id: float32, a copy for penalties, and for log-probabilities one more, with its order and its
# weights in numbers of 8 bytes.
LOGIT_BYTES = 40
# Of activations, in rows as wide as all query heads together: those of a layer with its gate and up, and some more.
ACTIVATION_ROWS = 32
# Rows times splits of one launch of the paged kernel, which takes the memory of the one before: 235 MB between its two
# kernels for 28 heads of 128, as float32.
ATTENTION_PARTS = 1 << 14
# Of a device: the allocator's fragments, the library's workspaces, kernels, captured graphs.
KEPT_SHARE = 0.05


def kv_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int | None) -> int:
    """Returns the bytes of a token's keys and values over all layers, in numbers of `itemsize` bytes, in FP8 with its
    scales where that is None."""
    head = head_dim + FP8_SCALE_BYTES if itemsize is None else head_dim * itemsize
    return 2 * num_layers * num_kv_heads * head


def step_bytes(num_heads: int, head_dim: int, vocab_size: int, itemsize: int, step_tokens: int) -> int:
    """Returns about how many bytes a step of `step_tokens` takes at most on a GPU beside weights and KV."""
    logits = step_tokens * vocab_size * LOGIT_BYTES
    activations = step_tokens * num_heads * head_dim * ACTIVATION_ROWS * itemsize
    attention = ATTENTION_PARTS * num_heads * (head_dim + 2) * 4
    return logits + activations + attention
