"""Loads what a verifier computes with: the target, what drafts beside it, and the engine of both."""

from __future__ import annotations

import importlib.util
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.backends.quantised.choice import parse_quantize
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.colocated.draft import load_draft
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.heads.source import DraftSource
from outrider.cloud_verifier.server.load_progress import LoadProgress
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
from outrider.common.config.units import parse_size
from outrider.common.errors import ModelError
from outrider.common.grammar.checked import CheckedCompiler
from outrider.common.process.extras import MissingExtraError

if TYPE_CHECKING:
    from outrider.cloud_verifier.backends.paged_backend import PagedBackend

log = logging.getLogger(__name__)


def load_models(config: ServeConfig, kv_bytes: int | None) -> tuple[PagedBackend, CoLocatedDrafter | None]:
    """Returns the target and the draft that `config` names. Raises `ModelError`, and what `create_drafter` raises."""
    from outrider.cloud_verifier.backends.loading import load_target

    with ThreadPoolExecutor(1) as beside, LoadProgress(config.target.name) as progress:
        kernels = beside.submit(load_row_kernels)  # much of it while torch computes
        backend = load_target(
            config.target,
            device=config.device,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            quantize=parse_quantize(config.quantize),
            kv_bytes=kv_bytes,
            step_tokens=config.max_step_tokens,
            heads_bytes=_heads_bytes(config),
            num_threads=config.num_threads,
            exact_rows=config.exact_rows,
            on_progress=progress,
        )
        drafter = create_drafter(config, backend)
        kernels.result()
    return backend, drafter


def _heads_bytes(config: ServeConfig) -> int:
    """Returns how much memory of a CUDA device `--heads` will take: weights, their KV, features of prompts, and the KV
    of sequences side by side, padded to up to twice as much."""
    if not config.heads:
        return 0
    from outrider.cloud_verifier.heads.directory import num_parameters

    kept = 4 * parse_size(config.draft_kv_memory, "--draft-kv-memory")
    number_bytes = 4 if config.dtype == "float32" else 2
    return kept + number_bytes * sum(num_parameters(Path(each)) for each in config.heads)


def create_engine(
    backend: TargetBackend,
    config: ServeConfig,
    drafter: CoLocatedDrafter | None = None,
    labels: tuple[str, ...] = (),
    grammars: GrammarStore | None = None,
) -> Engine:
    """Returns the engine of a verifier with these options. `labels` are added to those of `config`."""
    return Engine(
        backend,
        make_model_info(backend, config, drafter, labels, has_grammars=grammars is not None),
        drafter=drafter,
        grammars=grammars,
        max_step_tokens=config.max_step_tokens,
        prefill_chunk_tokens=config.prefill_chunk(backend.device),
        queue_limits=config.queue_limits,
        tenant_max_sessions=config.tenant_max_sessions,
        tenant_max_sampling_ids=config.tenant_max_sampling_ids,
        min_forward_s=config.min_forward_ms / 1000.0,
        hides_batch_size=config.hide_batch_size,
    )


def create_grammars(config: ServeConfig, backend: TargetBackend) -> GrammarStore | None:
    """Returns what compiles the grammars of sessions; None where llguidance is not installed, or none are taken."""
    if not config.max_grammar_bytes or importlib.util.find_spec("llguidance") is None:
        return None
    tokenizer_json = config.target / "tokenizer.json"
    return GrammarStore(
        CheckedCompiler(tokenizer_json, backend.num_tokens, tuple(backend.eos_token_ids)),
        max_bytes=parse_size(config.max_grammar_memory, "--max-grammar-memory"),
        tenant_max_bytes=parse_size(config.tenant_max_grammar_memory, "--tenant-max-grammar-memory"),
    )


def create_drafter(config: ServeConfig, backend: PagedBackend) -> CoLocatedDrafter | None:
    """Returns what drafts for co-located generation: the draft of `--draft`, unless it is off or the default one cannot
    be loaded (no onnxruntime, say), the heads of `--heads`, lookahead. None where there is nothing.

    Raises `ModelError` for what the user named and cannot be loaded, `IncompatibleError` for a draft with another
    tokenizer and heads of another target.
    """
    if config.draft_dir is None and not config.heads and not config.lookahead:
        return None
    sources: list[DraftSource] = []
    if config.heads:
        from outrider.cloud_verifier.heads.loading import load_heads

        sources += load_heads([Path(each) for each in config.heads], backend)
    if config.lookahead:
        from outrider.cloud_verifier.heads.lookahead import Lookahead

        sources.append(Lookahead(backend))
    draft = None
    if config.draft_dir is not None:
        try:
            draft = load_draft(
                config.draft_strategy,
                config.draft_dir,
                backend.tokenizer_fingerprint,
                num_threads=config.draft_threads,
                is_deferred=not config.draft and config.draft_strategy == "model",  # the embedded one
            )
        except (ModelError, MissingExtraError) as error:
            if config.draft:
                raise
            log.warning("no co-located draft: %s", error)
    if draft is None and not sources:
        return None
    return CoLocatedDrafter(
        draft, sources, max_kv_bytes=parse_size(config.draft_kv_memory, "--draft-kv-memory")
    )
