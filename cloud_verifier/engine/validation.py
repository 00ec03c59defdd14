"""Checks that a request must pass before any work is done for it: docs/protocol.md, "Limits and errors".

Every check raises `InvalidFieldError` (or `UnimplementedFieldError`) naming the field, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud_verifier.engine.method_fields import check_draft_fields, check_method_params
from outrider.cloud_verifier.engine.session import Session
from outrider.cloud_verifier.verification.logprobs import MAX_LOGPROBS
from outrider.common.errors import InvalidFieldError, UnimplementedFieldError
from outrider.common.methods import drafts_trees, num_support
from outrider.common.sampling.processors import check_sampling_params
from outrider.common.tree import check_parents
from outrider.common.types import (
    DRAFT_SOURCE,
    LOOKAHEAD,
    MAX_PROMPT_CHOICES,
    GenerateRequest,
    Method,
    ModelInfo,
    OpenRequest,
    VerifyRequest,
)


def check_open(request: OpenRequest, model: ModelInfo) -> None:
    """Raises `InvalidFieldError` for an opening that this model cannot serve."""
    _check_session_id(request.session_id)
    # Before the ids: those of another tokenizer mean nothing, and may even look valid.
    _check_fingerprint("tokenizer_fingerprint", request.tokenizer_fingerprint, model.tokenizer_fingerprint)
    _check_fingerprint("target_fingerprint", request.target_fingerprint, model.target_fingerprint)
    if not request.token_ids:
        raise InvalidFieldError("token_ids", "the prompt is empty")
    _check_ids("token_ids", request.token_ids, model.num_tokens)
    if len(request.token_ids) >= model.limits.max_context:
        raise InvalidFieldError(
            "token_ids",
            f"{len(request.token_ids)} tokens leave no room in a context of {model.limits.max_context}: "
            "shorten the prompt",
        )
    if not 1 <= request.num_prompt_tokens <= len(request.token_ids):
        raise InvalidFieldError(
            "num_prompt_tokens", f"is {request.num_prompt_tokens}; want 1 to {len(request.token_ids)}"
        )
    check_sampling_params(request.sampling, model.num_tokens)
    _check_ids("stop_token_ids", request.stop_token_ids, model.num_tokens)
    _check_method(request.method, model.methods)
    check_method_params(request)
    if request.draft_source and request.draft_source not in model.draft_sources:
        names = ", ".join(model.draft_sources) or "none"
        raise UnimplementedFieldError(
            "draft_source", f"{request.draft_source} is not offered here; this verifier has: {names}"
        )
    if request.draft_source == LOOKAHEAD and num_support(request.method):
        raise InvalidFieldError(
            "draft_source", f"{LOOKAHEAD} goes with methods coupled and typical: its guesses are no samples"
        )
    if request.num_logprobs > MAX_LOGPROBS:
        raise InvalidFieldError("num_logprobs", f"is {request.num_logprobs}; at most {MAX_LOGPROBS} a token")
    if request.num_prompt_choices > MAX_PROMPT_CHOICES:
        raise InvalidFieldError(
            "num_prompt_choices", f"is {request.num_prompt_choices}; at most {MAX_PROMPT_CHOICES}"
        )


def check_verify(request: VerifyRequest, session: Session, model: ModelInfo) -> None:
    """Raises `InvalidFieldError` for a round that does not fit the session, its method or the model."""
    _check_base(request, session)
    _check_ids("committed_tokens", request.committed_tokens, model.num_tokens)
    _check_ids("draft_tokens", request.draft_tokens, model.num_tokens)
    check_draft_fields(request, session.opening.method, model.num_tokens)
    if not request.candidates_from:
        _check_choice(request.base_position, request.committed_tokens, session)
    num_draft_tokens = len(request.draft_tokens)
    if request.parents:
        check_parents(request.parents, request.draft_tokens, model.limits.max_tree_nodes)
    elif num_draft_tokens > model.limits.max_draft_tokens:
        raise InvalidFieldError(
            "draft_tokens", f"{num_draft_tokens} of them; at most {model.limits.max_draft_tokens} a round"
        )
    total = request.base_position + len(request.committed_tokens) + num_draft_tokens + 1
    if total > model.limits.max_context:
        raise InvalidFieldError(
            "draft_tokens", f"the round would reach {total} tokens of {model.limits.max_context}"
        )


def check_generate(request: GenerateRequest, session: Session, model: ModelInfo) -> None:
    """Raises `InvalidFieldError` for a generation that does not fit the session or the model."""
    if request.is_co_located:
        _check_co_located(request, session.opening, model)
    _check_base(request, session)
    _check_ids("committed_tokens", request.committed_tokens, model.num_tokens)
    _check_choice(request.base_position, request.committed_tokens, session)
    if request.max_new_tokens < 1:
        raise InvalidFieldError("max_new_tokens", "must be at least 1")
    total = request.base_position + len(request.committed_tokens) + 1
    if total > model.limits.max_context:
        raise InvalidFieldError(
            "committed_tokens", f"the sequence would reach {total} tokens of {model.limits.max_context}"
        )


def _check_co_located(request: GenerateRequest, opening: OpenRequest, model: ModelInfo) -> None:
    if not opening.draft_source and DRAFT_SOURCE not in model.draft_sources:
        raise UnimplementedFieldError(
            "mode", "this verifier has no draft for co-located speculation: serve with --draft DIR"
        )
    if request.is_tree and not drafts_trees(opening.method):
        raise InvalidFieldError("is_tree", f"with method {opening.method} chains are drafted")
    limits = model.limits
    at_most = limits.max_tree_nodes if request.is_tree else limits.max_draft_tokens
    if request.num_speculative_tokens > at_most:
        raise InvalidFieldError(
            "num_speculative_tokens", f"is {request.num_speculative_tokens}; at most {at_most} a round"
        )


def check_round_id(request: VerifyRequest | GenerateRequest) -> None:
    """Checks that it is one, whatever the session's last one was. Raises `InvalidFieldError`."""
    if request.round_id < 1:
        raise InvalidFieldError("round_id", "must be at least 1")


def _check_base(request: VerifyRequest | GenerateRequest, session: Session) -> None:
    if request.base_position < session.opening.num_prompt_tokens:
        raise InvalidFieldError(
            "base_position",
            f"{request.base_position} is inside the prompt of {session.opening.num_prompt_tokens} tokens",
        )


def _check_choice(base_position: int, committed_tokens: Sequence[int], session: Session) -> None:
    """Checks that the edge commits the token after a rejection: the target's sample in its place is biased."""
    if base_position == session.choice_position and not committed_tokens:
        raise InvalidFieldError(
            "committed_tokens",
            f"the token at {base_position} is one of the candidates: commit the one that was chosen, "
            "or ask for more with candidates_from",
        )


def _check_session_id(session_id: bytes) -> None:
    if len(session_id) != 16:
        raise InvalidFieldError("session_id", f"has {len(session_id)} bytes; want 16 random ones")


def _check_ids(field: str, token_ids: Sequence[int], num_tokens: int) -> None:
    if token_ids and max(token_ids) >= num_tokens:
        raise InvalidFieldError(field, f"id {max(token_ids)} is past the tokenizer's {num_tokens} tokens")


def _check_fingerprint(field: str, theirs: str, ours: str) -> None:
    if theirs and theirs != ours:
        raise InvalidFieldError(field, f"the edge has {theirs}, this verifier has {ours}")


def _check_method(method: Method, allowed: Sequence[Method]) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise UnimplementedFieldError("method", f"{method} is not offered here; this verifier has: {names}")
