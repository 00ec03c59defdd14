"""What a model of transformers does before its first layer and after its last: embeds tokens, and scores states."""

from __future__ import annotations

from typing import Any

import torch

from outrider.cloud_verifier.backends.layers import capped


def embed(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the input embeddings [n, hidden_size] of ids [n], as they enter the first layer; a learned embedding of
    their positions is added later."""
    embedded: torch.Tensor = model.get_input_embeddings()(token_ids)
    factor = getattr(model.config, "embedding_multiplier", None)  # Granite
    return embedded if factor is None else embedded * factor


def score(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Returns logits [n, vocab_size] of states after the final norm [n, hidden_size]."""
    logits: torch.Tensor = model.get_output_embeddings()(states)
    divisor, factor = (getattr(model.config, name, None) for name in ("logits_scaling", "logit_scale"))
    if divisor is not None:  # Granite
        logits = logits / divisor
    if factor is not None:  # Cohere
        logits = logits * factor
    return capped(logits, getattr(model.config, "final_logit_softcapping", None))  # Gemma 2
