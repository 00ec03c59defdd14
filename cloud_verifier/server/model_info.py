"""What a verifier says of itself: its target and its limits, as `Describe` answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import ServeConfig, parse_methods
from outrider.common.process.version import own_version
from outrider.common.types import PROTOCOL_VERSION, Limits, ModelInfo

if TYPE_CHECKING:  # it imports the draft's code
    from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter


def make_model_info(
    backend: TargetBackend,
    config: ServeConfig,
    drafter: CoLocatedDrafter | None = None,
    labels: tuple[str, ...] = (),
    *,
    has_grammars: bool = False,
) -> ModelInfo:
    """Returns what this verifier answers to `Describe`. `labels` are added to those of `config`."""
    limits = Limits(
        max_context=min(backend.max_context, config.session_max_tokens or backend.max_context),
        max_draft_tokens=config.max_draft_tokens,
        max_message_bytes=config.max_message_bytes,
        max_sessions=config.max_sessions,
        session_idle_ttl_ms=int(config.session_idle_ttl_s * 1000),
        max_sampling_ids=config.max_sampling_ids,
        max_tree_nodes=min(config.max_tree_nodes, backend.max_tree_nodes),
        max_grammar_bytes=config.max_grammar_bytes if has_grammars else 0,
    )
    own_labels = (f"min-forward-ms={config.min_forward_ms:g}",) if config.min_forward_ms else ()
    return ModelInfo(
        protocol_version=PROTOCOL_VERSION,
        model_id=backend.model_id,
        target_fingerprint=backend.fingerprint,
        tokenizer_fingerprint=backend.tokenizer_fingerprint,
        dtype=backend.dtype,
        device=backend.device,
        eos_token_ids=tuple(backend.eos_token_ids),
        num_tokens=backend.num_tokens,
        limits=limits,
        methods=parse_methods(config.methods),
        server_version=own_version(),
        labels=(*own_labels, *labels),
        draft_fingerprint=drafter.fingerprint if drafter else "",
        is_reproducible=backend.is_reproducible,
        kv_dtype=backend.kv_dtype,
        draft_sources=drafter.sources if drafter else (),
        quantisation=backend.quantisation,
    )
