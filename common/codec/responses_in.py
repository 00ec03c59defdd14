"""Decodes responses. All decoders raise `InvalidFieldError` for a malformed field (see the package).

Text is decoded without control characters: a person may read it in a terminal.
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
    check_length,
    decode_origins,
    lookup,
)
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.printable import one_line
from outrider.common.types import (
    DRAFT_SOURCE,
    Candidate,
    Closed,
    Draining,
    GeneratedTokens,
    Limits,
    MemoryUse,
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

_MOST_LOGPROB = 1e-4  # 0 but for rounding: float32 near a logit of a thousand is that coarse


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
            return Draining(grace_ms=message.draining.grace_ms, reason=one_line(message.draining.reason))
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
                step_session_ns=opened.step_session_ns,
                step_token_ns=opened.step_token_ns,
                stream_gap_ns=opened.stream_gap_ns,
                prompt_choices=tuple(opened.prompt_choices),
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
                candidates=tuple([_decode_candidate(each) for each in verdict.candidates]),
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
            num_tokens = len(tokens.token_ids)
            if len(tokens.origins) != num_tokens:
                raise InvalidFieldError(
                    "origins", f"has {len(tokens.origins)} entries for {num_tokens} tokens"
                )
            check_length("logprobs", tokens.logprobs, num_tokens, "token")
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
    if not 0 < message.num_tokens or max(message.eos_token_ids, default=0) >= message.num_tokens:
        eos = list(message.eos_token_ids)
        raise InvalidFieldError("num_tokens", f"is {message.num_tokens}, and end-of-text ids are {eos}")
    limits = Limits(
        max_context=message.limits.max_context,
        max_draft_tokens=message.limits.max_draft_tokens,
        max_message_bytes=message.limits.max_message_bytes,
        max_sessions=message.limits.max_sessions,
        session_idle_ttl_ms=message.limits.session_idle_ttl_ms,
        max_sampling_ids=message.limits.max_sampling_ids,
        max_tree_nodes=message.limits.max_tree_nodes,
        max_grammar_bytes=message.limits.max_grammar_bytes,
    )
    return ModelInfo(
        protocol_version=message.protocol_version,
        model_id=one_line(message.model_id),
        target_fingerprint=one_line(message.target_fingerprint),
        tokenizer_fingerprint=one_line(message.tokenizer_fingerprint),
        dtype=one_line(message.dtype),
        device=one_line(message.device),
        eos_token_ids=tuple(message.eos_token_ids),
        num_tokens=message.num_tokens,
        limits=limits,
        # A newer verifier may offer methods this edge does not know; it cannot ask for them either.
        methods=tuple(METHODS[m] for m in message.methods if m in METHODS),
        server_version=one_line(message.server_version),
        labels=tuple(map(one_line, message.labels)),
        draft_fingerprint=one_line(message.draft_fingerprint),
        is_reproducible=message.is_reproducible,
        kv_dtype=one_line(message.kv_dtype),
        draft_sources=tuple(map(one_line, message.draft_sources)) or _of_older(message),
        quantisation=one_line(message.quantisation),
        memory=_decode_memory(message.memory) if message.HasField("memory") else None,
    )


def _decode_memory(message: pb.Memory) -> MemoryUse:
    return MemoryUse(message.weights, message.kv, message.peak, message.peak_reserved)


def _of_older(message: pb.DescribeResponse) -> tuple[str, ...]:
    return (DRAFT_SOURCE,) if message.draft_fingerprint else ()


def _decode_candidate(message: pb.Candidate) -> Candidate:
    if not 0.0 <= message.target_prob <= 1.0:  # also false for NaN
        raise InvalidFieldError("candidates", f"have the probability {message.target_prob}")
    return Candidate(message.token_id, message.target_prob)


def _decode_metrics(message: pb.RoundMetrics) -> RoundMetrics:
    if not 0.0 <= message.la_over_k <= 1.0 or message.alpha_mean < 0.0 or message.alpha_mean > 1.0:
        shares = f"{message.la_over_k} and {message.alpha_mean}"
        raise InvalidFieldError("metrics", f"have the shares {shares}; want 0 to 1")
    return RoundMetrics(
        alpha_mean=message.alpha_mean if message.alpha_mean or message.total_ns else math.nan,
        la_over_k=message.la_over_k,
        queue_ns=message.queue_ns,
        forward_ns=message.forward_ns,
        total_ns=message.total_ns,
        batch_size=message.batch_size,
        step_token_ns=message.step_token_ns,
        num_active_sessions=message.num_active_sessions,
    )


def _decode_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    # Not even the processed one may be infinite: the target gives every token that is emitted some probability.
    values = (message.raw_logprob, message.processed_logprob, *message.top_logprobs)
    # A sum of floats is finite exactly where they all are: as doubles they cannot overflow.
    if not math.isfinite(sum(values)) or max(values) > _MOST_LOGPROB:
        raise InvalidFieldError("logprobs", "are not finite numbers of at most 0")
    if len(message.top_logprobs) != len(message.top_token_ids):
        raise InvalidFieldError("logprobs", "are not one for each token id")
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
        message=one_line(message.message),
        field=one_line(message.field),
        retry_after_ms=message.retry_after_ms,
        position=message.position,
        hash=message.hash,
    )
