"""Compares faster forwards with the plain one at load, and drops those that differ."""

from __future__ import annotations

import logging

import numpy as np
import torch

from outrider.cloud_verifier.backends import varlen
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.transformers_backend import TargetFacts, TransformersBackend
from outrider.common.errors import ModelError

logger = logging.getLogger(__name__)

PROBE_TOKENS = 6
MAX_VARLEN_ERROR = 5e-2  # of the largest logit; both are bfloat16


def find_varlen_page_size(facts: TargetFacts) -> int | None:
    """Returns the block size with which torch's paged attention is correct on this device; None: use SDPA."""
    if not facts.device.startswith("cuda") or facts.dtype != "bfloat16":
        return None
    kernel = varlen.find_kernel()
    if kernel is None:
        return None
    return varlen.find_page_size(
        kernel,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=torch.bfloat16,
        device=torch.device(facts.device),
    )


def use_varlen_if_right(backend: TransformersBackend, reference: Logits) -> None:
    """Switches to torch's paged kernel, unless the model's logits then differ from `reference`."""
    kernel, planner = varlen.find_kernel(), backend.planner
    assert kernel is not None, "a page size was found with it"
    backend.planner = varlen.VarlenPlanner(kernel, torch.device(backend.device), planner)
    if (reason := _difference(backend, reference, MAX_VARLEN_ERROR)) is not None:
        backend.planner = planner
        backend.clear_kv()
        logger.warning("variable-length attention is not used (gathered blocks instead): %s", reason)


def _difference(backend: TransformersBackend, reference: Logits, tolerance: float) -> str | None:
    try:
        error = float(abs(probe(backend) - reference).max())
    except ModelError as failure:
        return str(failure)
    is_right = error <= tolerance * max(1.0, float(abs(reference).max()))  # not of NaN
    return None if is_right else f"its logits are off by {error:.1e}"


def probe(backend: TransformersBackend) -> Logits:
    """Returns the logits of a few tokens in two forwards, neither of one row: what a decoder prepares for single
    rows is not needed where exact rows pad them. Raises `ModelError` unless each layer attends once, with
    the expected shapes."""
    sequence = backend.new_sequence()
    ids = [(7 * i + 1) % backend.num_tokens for i in range(PROBE_TOKENS)]
    try:
        first = backend.forward([ForwardItem(sequence, ids[:-2], len(ids) - 2)]).copy()
        logits = np.concatenate([first, backend.forward([ForwardItem(sequence, ids[-2:], 2)])])
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError) as error:
        raise ModelError(f"{backend.model_id} cannot run over paged KV: {error}") from error
    finally:
        backend.close(sequence)
        backend.num_forwards = backend.num_query_rows = 0
    seen = backend.rules_seen
    if list(seen) != list(range(backend.facts.num_layers)):
        raise ModelError(f"{backend.model_id} cannot run over paged KV: layers {list(seen)} attended")
    context, windows = backend.max_context, [rule.window for rule in seen.values()]
    if [window if window and window < context else None for window in windows] != [*backend.facts.windows]:
        raise ModelError(
            f"{backend.model_id} cannot run over paged KV: its layers attend over windows of {windows} tokens, "
            f"its configuration says {[*backend.facts.windows]}"
        )
    return logits
