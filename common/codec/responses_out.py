"""Encodes responses. Trusts our own dataclasses."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from outrider.common.codec.tables import (
    ERROR_NUMBERS,
    KIND_NUMBERS,
    METHOD_NUMBERS,
    ORIGIN_NUMBERS,
    GenerateReply,
    OpenReply,
    VerifyReply,
)
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    Closed,
    Draining,
    GeneratedTokens,
    GenerateRequest,
    ModelInfo,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    RoundMetrics,
    SessionRequest,
    SessionResponse,
    TokenLogprobs,
    Verdict,
)


def encode_response(
    response: SessionResponse, kind: type[SessionRequest] | None = None
) -> pb.SessionResponse:
    """Encodes one message of the `Session` stream; a `RoundError` or `Progress` answers a request of `kind`."""
    match response:
        case Verdict():
            message = pb.SessionResponse()
            _fill_verdict(message.verify.verdict, response)
            return message
        case GeneratedTokens():
            return pb.SessionResponse(generate=encode_generate_response(response))
        case Opened():
            return pb.SessionResponse(open=encode_open_response(response))
        case Closed():
            return pb.SessionResponse(close=encode_closed(response))
        case Draining():
            draining = pb.Draining(grace_ms=response.grace_ms, reason=response.reason)
            return pb.SessionResponse(draining=draining)
        case RoundError() | Progress():
            if kind is OpenRequest:
                return pb.SessionResponse(open=encode_open_response(response))
            if kind is GenerateRequest:
                return pb.SessionResponse(generate=encode_generate_response(response))
            return pb.SessionResponse(verify=encode_verify_response(response))


def encode_refusal(round_id: int, message: str, retry_after_ms: int) -> bytes:
    """Returns a serialised refusal of a round on the `Session` stream. Equal messages are encoded once."""
    refusal = pb.SessionResponse.FromString(_refusal_of_no_round(message, retry_after_ms))
    refusal.verify.error.round_id = round_id
    return bytes(refusal.SerializeToString())


@lru_cache(maxsize=16)
def _refusal_of_no_round(message: str, retry_after_ms: int) -> bytes:
    error = RoundError(0, RoundErrorCode.REFUSED, message, retry_after_ms=retry_after_ms)
    return bytes(encode_response(error).SerializeToString())


def encode_open_response(response: OpenReply) -> pb.OpenResponse:
    """Encodes the answer to an opening."""
    if isinstance(response, Opened):
        return pb.OpenResponse(
            opened=pb.Opened(
                describe=encode_model_info(response.model),
                first_token=response.first_token,
                position=response.position,
                hash=response.hash,
                is_existing=response.is_existing,
                metrics=_encode_metrics(response.metrics),
                logprobs=_encode_logprobs(response.logprobs) if response.logprobs else None,
                step_fixed_ns=response.step_fixed_ns,
                step_session_ns=response.step_session_ns,
                step_token_ns=response.step_token_ns,
                stream_gap_ns=response.stream_gap_ns,
                prompt_choices=response.prompt_choices,
            )
        )
    if isinstance(response, Progress):
        return pb.OpenResponse(progress=_encode_progress(response))
    return pb.OpenResponse(error=_encode_error(response))


def encode_verify_response(response: VerifyReply) -> pb.VerifyResponse:
    """Encodes the answer to a round."""
    if isinstance(response, Verdict):
        message = pb.VerifyResponse()
        _fill_verdict(message.verdict, response)
        return message
    if isinstance(response, Progress):
        return pb.VerifyResponse(progress=_encode_progress(response))
    return pb.VerifyResponse(error=_encode_error(response))


def _fill_verdict(message: pb.Verdict, verdict: Verdict) -> None:
    """Fills a message in place: one passed to another's constructor would be copied, twice here.

    The hot path.
    """
    message.round_id = verdict.round_id
    message.accepted_len = verdict.accepted_len
    message.correction = verdict.correction
    message.correction_kind = KIND_NUMBERS[verdict.correction_kind]
    message.position = verdict.position
    message.hash = verdict.hash
    if verdict.accepted_nodes:
        message.accepted_nodes.extend(verdict.accepted_nodes)
    for candidate in verdict.candidates:
        message.candidates.add(token_id=candidate.token_id, target_prob=candidate.target_prob)
    if verdict.logprobs:
        message.logprobs.extend([_encode_logprobs(entry) for entry in verdict.logprobs])
    _fill_metrics(message.metrics, verdict.metrics)


def encode_generate_response(response: GenerateReply) -> pb.GenerateResponse:
    """Encodes one answer of a stream of generated tokens."""
    if isinstance(response, GeneratedTokens):
        tokens = pb.GeneratedTokens(
            round_id=response.round_id,
            token_ids=response.token_ids,
            origins=[ORIGIN_NUMBERS[o] for o in response.origins],
            position=response.position,
            hash=response.hash,
            is_last=response.is_last,
            metrics=_encode_metrics(response.metrics),
            logprobs=[_encode_logprobs(entry) for entry in response.logprobs],
            num_draft_tokens=response.num_draft_tokens,
            draft_ns=response.draft_ns,
        )
        return pb.GenerateResponse(tokens=tokens)
    if isinstance(response, Progress):
        return pb.GenerateResponse(progress=_encode_progress(response))
    return pb.GenerateResponse(error=_encode_error(response))


def encode_closed(response: Closed) -> pb.CloseResponse:
    """Encodes the answer to a close."""
    return pb.CloseResponse(was_open=response.was_open, position=response.position)


def encode_model_info(info: ModelInfo) -> pb.DescribeResponse:
    """Encodes a `Describe`."""
    limits = pb.Limits(
        max_context=info.limits.max_context,
        max_draft_tokens=info.limits.max_draft_tokens,
        max_message_bytes=info.limits.max_message_bytes,
        max_sessions=info.limits.max_sessions,
        session_idle_ttl_ms=info.limits.session_idle_ttl_ms,
        max_sampling_ids=info.limits.max_sampling_ids,
        max_tree_nodes=info.limits.max_tree_nodes,
        max_grammar_bytes=info.limits.max_grammar_bytes,
    )
    return pb.DescribeResponse(
        protocol_version=info.protocol_version,
        model_id=info.model_id,
        target_fingerprint=info.target_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        dtype=info.dtype,
        device=info.device,
        eos_token_ids=info.eos_token_ids,
        num_tokens=info.num_tokens,
        limits=limits,
        methods=[METHOD_NUMBERS[m] for m in info.methods],
        server_version=info.server_version,
        labels=info.labels,
        draft_fingerprint=info.draft_fingerprint,
        is_reproducible=info.is_reproducible,
        kv_dtype=info.kv_dtype,
        draft_sources=info.draft_sources,
        quantisation=info.quantisation,
        memory=None if info.memory is None else pb.Memory(**dataclasses.asdict(info.memory)),
    )


def _encode_metrics(metrics: RoundMetrics) -> pb.RoundMetrics:
    message = pb.RoundMetrics()
    _fill_metrics(message, metrics)
    return message


def _fill_metrics(message: pb.RoundMetrics, metrics: RoundMetrics) -> None:
    message.alpha_mean = metrics.alpha_mean
    message.la_over_k = metrics.la_over_k
    message.queue_ns = metrics.queue_ns
    message.forward_ns = metrics.forward_ns
    message.total_ns = metrics.total_ns
    message.batch_size = metrics.batch_size
    message.step_token_ns = metrics.step_token_ns
    message.num_active_sessions = metrics.num_active_sessions


def _encode_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        raw_logprob=entry.raw_logprob,
        processed_logprob=entry.processed_logprob,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _encode_progress(progress: Progress) -> pb.Progress:
    return pb.Progress(round_id=progress.round_id, done=progress.done, total=progress.total)


def _encode_error(error: RoundError) -> pb.RoundError:
    return pb.RoundError(
        round_id=error.round_id,
        code=ERROR_NUMBERS[error.code],
        field=error.field,
        message=error.message,
        retry_after_ms=error.retry_after_ms,
        position=error.position,
        hash=error.hash,
    )
