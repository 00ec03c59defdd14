"""What is known of a target once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.common.models.memory import kv_token_bytes


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Holds what is known of a loaded model: its sizes, limits and identity."""

    num_tokens: int
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    model_id: str
    fingerprint: str
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer: tokens that it attends over, None: all
    files_fingerprint: str  # of the directory; `fingerprint` is equal where the text is
    quantisation: str = ""  # "nf4", "fp4" or "fp8": of the weights, or of their files; "": none
    has_fp8_kv: bool = False  # keys and values are kept in FP8 (`kernels.fp8`), else in `dtype`

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values over all layers."""
        number_bytes = None if self.has_fp8_kv else int(getattr(torch, self.dtype).itemsize)
        return kv_token_bytes(self.num_layers, self.num_kv_heads, self.head_dim, number_bytes)
