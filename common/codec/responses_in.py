"""Decodes responses.

All decoders raise `InvalidFieldError` for an empty message or one of a newer protocol.
"""

from __future__ import annotations

import math

from outrider.common.codec.tables import (
    ERRORS,
    KINDS,
    METHODS,
    GenerateReply,
    OpenReply,
    VerifyReply,
    decode_origins,
    lookup,
)
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    Candidate,
    Closed,
    Draining,
    GeneratedTokens,
    Limits,
    ModelInfo,
    Opened,
    Progress,
    RoundError,
    RoundErrorCode,
    RoundMetrics,
    SessionResponse,
    TokenLogprobs,
    Verdict,
)


def decode_response(message: pb.SessionResponse) -> SessionResponse:
    """Decodes one message of the `Session` stream."""
    match message.WhichOneof("body"):
        case "verify":
            return decode_verify_response(message.verify)
        case "generate":
            return decode_generate_response(message.generate)
        case "open":
            return decode_open_response(message.open)
        case "close":
            return decode_closed(message.close)
        case "draining":
            return Draining(grace_ms=message.draining.grace_ms, reason=message.draining.reason)
        case _:
            raise InvalidFieldError("body", "empty message, or one of a newer protocol")


def decode_open_response(message: pb.OpenResponse) -> OpenReply:
    """Decodes the answer to an opening."""
    match message.WhichOneof("body"):
        case "opened":
            opened = message.opened
            return Opened(
                model=decode_model_info(opened.describe),
                first_token=opened.first_token,
                position=opened.position,
                hash=opened.hash,
                is_existing=opened.is_existing,
                metrics=_decode_metrics(opened.metrics),
                logprobs=_decode_logprobs(opened.logprobs) if opened.HasField("logprobs") else None,
                step_fixed_ns=opened.step_fixed_ns,
                step_token_ns=opened.step_token_ns,
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("open", "empty message")


def decode_verify_response(message: pb.VerifyResponse) -> VerifyReply:
    """Decodes the answer to a round."""
    match message.WhichOneof("body"):
        case "verdict":
            verdict = message.verdict
            return Verdict(
                round_id=verdict.round_id,
                accepted_len=verdict.accepted_len,
                correction=verdict.correction,
                correction_kind=lookup(KINDS, verdict.correction_kind, "correction_kind"),
                position=verdict.position,
                hash=verdict.hash,
                accepted_nodes=tuple(verdict.accepted_nodes[:]),
                candidates=tuple([Candidate(c.token_id, c.target_prob) for c in verdict.candidates]),
                logprobs=tuple([_decode_logprobs(entry) for entry in verdict.logprobs]),
                metrics=_decode_metrics(verdict.metrics),
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("verify", "empty message")


def decode_generate_response(message: pb.GenerateResponse) -> GenerateReply:
    """Decodes one answer of a stream of generated tokens."""
    match message.WhichOneof("body"):
        case "tokens":
            tokens = message.tokens
            return GeneratedTokens(
                round_id=tokens.round_id,
                token_ids=tuple(tokens.token_ids),
                origins=decode_origins(tokens.origins),
                position=tokens.position,
                hash=tokens.hash,
                is_last=tokens.is_last,
                metrics=_decode_metrics(tokens.metrics),
                logprobs=tuple(_decode_logprobs(entry) for entry in tokens.logprobs),
                num_draft_tokens=tokens.num_draft_tokens,
                draft_ns=tokens.draft_ns,
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("generate", "empty message")


def decode_closed(message: pb.CloseResponse) -> Closed:
    """Decodes the answer to a close."""
    return Closed(was_open=message.was_open, position=message.position)


def decode_model_info(message: pb.DescribeResponse) -> ModelInfo:
    """Decodes a `Describe`; methods that this edge does not implement are left out."""
    limits = Limits(
        max_context=message.limits.max_context,
        max_draft_tokens=message.limits.max_draft_tokens,
        max_message_bytes=message.limits.max_message_bytes,
        max_sessions=message.limits.max_sessions,
        session_idle_ttl_ms=message.limits.session_idle_ttl_ms,
    )
    return ModelInfo(
        protocol_version=message.protocol_version,
        model_id=message.model_id,
        target_fingerprint=message.target_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        dtype=message.dtype,
        device=message.device,
        eos_token_ids=tuple(message.eos_token_ids),
        num_tokens=message.num_tokens,
        limits=limits,
        # A newer verifier may offer methods this edge does not know; it cannot ask for them either.
        methods=tuple(METHODS[m] for m in message.methods if m in METHODS),
        server_version=message.server_version,
        labels=tuple(message.labels),
        draft_fingerprint=message.draft_fingerprint,
        is_reproducible=message.is_reproducible,
    )


def _decode_metrics(message: pb.RoundMetrics) -> RoundMetrics:
    return RoundMetrics(
        alpha_mean=message.alpha_mean if message.alpha_mean or message.total_ns else math.nan,
        la_over_k=message.la_over_k,
        queue_ns=message.queue_ns,
        forward_ns=message.forward_ns,
        total_ns=message.total_ns,
        batch_size=message.batch_size,
    )


def _decode_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        raw_logprob=message.raw_logprob,
        processed_logprob=message.processed_logprob,
        top_token_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def _decode_progress(message: pb.Progress) -> Progress:
    return Progress(round_id=message.round_id, done=message.done, total=message.total)


def _decode_error(message: pb.RoundError) -> RoundError:
    return RoundError(
        round_id=message.round_id,
        code=ERRORS.get(message.code, RoundErrorCode.INTERNAL),
        message=message.message,
        field=message.field,
        retry_after_ms=message.retry_after_ms,
        position=message.position,
        hash=message.hash,
    )
