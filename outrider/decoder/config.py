"""The configuration of `SpeculativeDecoder`, with the names of the field's reference interface."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class DraftStrategy(enum.StrEnum):
    """Names what drafts."""

    SMALL_MODEL = "small_model"  # a draft model of the target's family
    QUANTIZED = "quantized"  # the target, or another model of its family, with quantised weights
    PREFIX_LAYERS = "prefix_layers"  # the target's first layers
    MEDUSA = "medusa"  # heads trained for the target, as the next two
    HYDRA = "hydra"
    EAGLE = "eagle"
    EARLY_EXIT = "early_exit"  # some of the target's layers, listed in a directory
    LOOKAHEAD = "lookahead"  # n-grams that the target finds by Jacobi iteration
    NGRAM = "ngram"  # n-grams of the text so far (prompt lookup)
    SUFFIX = "suffix"
    RETRIEVAL = "retrieval"
    STAGED = "staged"


class TreeStrategy(enum.StrEnum):
    """Names the shape of drafts."""

    NONE = "none"  # a chain
    LINEAR = "linear"  # a chain too: a tree of width 1
    TREE = "tree"


@dataclass(slots=True)
class SpeculativeConfig:
    """Configures speculative decoding. docs/library.md has what each field does, and where it does nothing."""

    draft_strategy: DraftStrategy | str = DraftStrategy.SMALL_MODEL
    draft_model_path: str | Path | None = None
    draft_num_layers: int | None = None
    draft_quant_dtype: str | None = None  # int4 | fp8
    num_speculative_tokens: int = 4
    max_speculative_tokens: int = 8
    min_speculative_tokens: int = 2
    adaptive_depth: bool = True
    target_acceptance_rate: float = 0.7
    tree_strategy: TreeStrategy | str = TreeStrategy.NONE
    tree_width: int = 2
    tree_depth: int = 3
    share_kv_cache: bool = True
    reuse_draft_kv: bool = True
    kv_compression: bool = False  # KV of the draft in FP8
    verify_in_parallel: bool = True
    early_rejection: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    prefill_with_verify: bool = True
    fuse_draft_verify: bool = False
    use_cuda_graph: bool = False
    log_acceptance_rate: bool = True
    log_speedup: bool = True
