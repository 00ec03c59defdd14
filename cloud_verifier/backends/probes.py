"""Compares forwards at load: faster ones with the plain one, and the plain one with transformers' own."""

from __future__ import annotations

import logging
from typing import Protocol, SupportsFloat, runtime_checkable

import numpy as np
import torch

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, Logits, open_sequence
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.errors import ModelError
from outrider.common.tree import Tree
from outrider.kernels.kv_pool import KVPool

logger = logging.getLogger(__name__)

PROBE_TOKENS = 6
EMBEDDINGS = -1  # of a model of transformers: the states before its first layer
# Queries and tokens in KV of the sequences with which two ways to attend are compared; the last is a tree.
PROBE_SHAPES = ((5, 613), (1, 40), (40, 40), (9, 77))
PROBE_TREE = Tree((-1, 0, 1, 0, -1, 4, 4))
# Of the largest number: bfloat16 rounds at 2^-8 in every layer.
MAX_ERROR = {"bfloat16": 5e-2, "float32": 1e-3}
# The same, of logits over KV in FP8: keys and values that differ in their last bits may become numbers that differ by a
# sixteenth. Two right ways to attend differed by up to 0.07 over 28 layers in bfloat16, without FP8 by 0.03.
MAX_FP8_ERROR = 0.2


def use_paged_kernel(backend: PagedBackend, reference: Logits) -> None:
    """Switches to our paged attention kernel, unless it cannot run here, or attention or the model's logits
    (`reference`) then differ."""
    planner = backend.planner
    try:
        from outrider.cloud_verifier.backends.attention.paged import PagedPlanner

        facts = backend.facts
        num_groups, device = facts.num_heads // facts.num_kv_heads, torch.device(facts.device)
        upload = backend.inputs.add if backend.inputs else None
        backend.planner = PagedPlanner(backend.blocks.block_size, num_groups, device, upload=upload)
        reason = _attention_difference(backend, planner) or _difference(backend, probe(backend), reference)
    except Exception as error:  # no Triton, no compiler for it, a GPU that it does not support
        reason = str(error) or type(error).__name__
    backend.has_paged_kernel = reason is None
    if reason is not None:
        backend.planner = planner
        backend.clear_kv()
        logger.warning("the paged attention kernel is not used (gathered blocks instead): %s", reason)


@runtime_checkable
class OwnAttention(Protocol):
    """Declares a decoder whose code can attend without ours."""

    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocab_size] of ids [n], computed without ours. Raises RuntimeError where it cannot."""


@torch.inference_mode()
def _attention_difference(backend: PagedBackend, other: AttentionPlanner) -> str | None:
    """Returns by how much the backend's planner and another one differ, None where it is little."""
    facts, size = backend.facts, backend.blocks.block_size
    shapes = [shape for shape in PROBE_SHAPES if shape[1] <= backend.max_context]
    num_blocks = sum(-(-length // size) for _, length in shapes)
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    sequences, start = list[PackedSequence](), 0
    for num_queries, length in shapes:
        block_ids = [free.pop() for _ in range(-(-length // size))]
        tree = PROBE_TREE if (num_queries, length) == PROBE_SHAPES[-1] else None
        sequences.append(PackedSequence(start, num_queries, length, block_ids, tree=tree))
        start += num_queries
    pool = (num_blocks, size, facts.num_kv_heads, facts.head_dim)
    keys, values, query = (
        torch.randn(shape, generator=generator).to(device=backend.device, dtype=getattr(torch, facts.dtype))
        for shape in (pool, pool, (facts.num_heads, start, facts.head_dim))
    )
    key_pool, value_pool = (KVPool.holding(each, is_fp8=facts.has_fp8_kv) for each in (keys, values))
    for rule in backend.rules:
        found, expected = (
            each.plan(sequences)(query, key_pool, value_pool, rule).float()
            for each in (backend.planner, other)
        )
        error, largest = (found - expected).abs().max(), expected.abs().max()
        if (reason := _excess("attention", error, largest, MAX_ERROR[facts.dtype])) is not None:
            return reason
    return None


def _difference(backend: PagedBackend, found: Logits, reference: Logits) -> str | None:
    error = abs(found - reference).max()
    most = MAX_FP8_ERROR if backend.facts.has_fp8_kv else MAX_ERROR[backend.dtype]
    return _excess("a logit", error, abs(reference).max(), most)


def _excess(what: str, error: SupportsFloat, largest: SupportsFloat, most: float) -> str | None:
    largest = float(largest)
    is_right = float(error) <= most * max(1.0, largest)  # not of NaN
    return None if is_right else f"{what} is off by {float(error):.1e}, where the largest is {largest:.1e}"


@torch.inference_mode()
def check_own_attention(backend: PagedBackend, found: Logits) -> None:
    """Raises `ModelError` unless a model of transformers has the logits of `probe` (`found`) with its own attention and
    positions too."""
    if not isinstance(backend.decoder, OwnAttention):
        return
    ids = torch.tensor(_probe_ids(backend), device=backend.device)
    try:
        own = backend.decoder.own_logits(ids).float().cpu().numpy()
    except RuntimeError as error:
        raise ModelError(f"transformers cannot compute {backend.model_id}: {error}") from error
    if (reason := _difference(backend, found, own)) is not None:
        raise ModelError(
            f"{backend.model_id} cannot run over paged KV: it attends, or counts positions, in another way, as {reason}"
        )


def _probe_ids(backend: PagedBackend) -> list[int]:
    return [(7 * i + 1) % backend.num_tokens for i in range(PROBE_TOKENS)]


def probe(backend: PagedBackend) -> Logits:
    """Returns the logits of a few tokens in two forwards, neither of one row: what a decoder prepares for single
    rows is not needed where exact rows pad them. Raises `ModelError` unless each layer attends once, with
    the expected shapes."""
    ids = _probe_ids(backend)
    try:
        with open_sequence(backend) as sequence:
            first = backend.forward([ForwardItem(sequence, ids[:-2], len(ids) - 2)]).copy()
            logits = np.concatenate([first, backend.forward([ForwardItem(sequence, ids[-2:], 2)])])
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError) as error:
        raise ModelError(f"{backend.model_id} cannot run over paged KV: {error}") from error
    finally:
        backend.num_forwards = backend.num_query_rows = 0
    seen = backend.rules_seen
    if list(seen) != list(range(backend.facts.num_layers)):
        raise ModelError(f"{backend.model_id} cannot run over paged KV: layers {list(seen)} attended")
    context, windows = backend.facts.max_context, [rule.window for rule in seen.values()]
    if [window if window and window < context else None for window in windows] != [*backend.facts.windows]:
        raise ModelError(
            f"{backend.model_id} cannot run over paged KV: its layers attend over windows of {windows} tokens, "
            f"its configuration says {[*backend.facts.windows]}"
        )
    return logits


@torch.inference_mode()
def check_model_ends(backend: PagedBackend) -> None:
    """Raises `ModelError` unless heads can draft with the decoder's `embed` and `score`: a forward of a model of
    transformers has such embeddings and logits too."""
    if not backend.decoder.is_of_transformers:
        return
    kept, last = backend.feature_layers, backend.facts.num_layers
    backend.feature_layers = (EMBEDDINGS, last)
    ids = [1, 2, 1]
    try:
        with open_sequence(backend) as sequence:
            logits = torch.as_tensor(backend.forward([ForwardItem(sequence, ids, len(ids))])).cpu()
        first, states = backend.features[EMBEDDINGS], backend.features[last]
    finally:
        backend.feature_layers, backend.features = kept, {}
        backend.num_forwards = backend.num_query_rows = 0
    embedded = backend.decoder.embed(torch.tensor(ids, device=backend.device))
    pairs = {
        "a logit": (logits, backend.decoder.score(states).float().cpu()),
        "an embedding": (first, embedded),
    }
    if not torch.equal(first[0], first[2]):  # positions are added to it
        del pairs["an embedding"]
    for what, (whole, alone) in pairs.items():
        error, largest = (whole - alone).abs().max(), whole.abs().max()
        if (reason := _excess(what, error, largest, MAX_ERROR[backend.dtype])) is not None:
            raise ModelError(
                f"{backend.model_id} cannot have heads: the model does more before its first layer, or after its last, "
                f"than is known, as {reason}"
            )
