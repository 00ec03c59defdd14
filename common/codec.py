"""Dataclasses to protobuf and back: the only place where the two meet.

Encoding trusts our own dataclasses. Decoding trusts nobody: what a single message can show to be wrong
(lengths that disagree, probabilities out of range, unknown enum values) raises `InvalidFieldError` naming
the field as it stands in docs/protocol.md. What needs the model or the session is checked by the verifier
(`cloud_verifier.validation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from common.errors import InvalidFieldError
from common.pb import outrider_pb2 as pb
from common.types import (
    CancelRequest,
    Candidate,
    Closed,
    CloseRequest,
    CorrectionKind,
    Draining,
    GeneratedTokens,
    GenerateRequest,
    Limits,
    Method,
    MethodParams,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    Progress,
    RoundError,
    RoundErrorCode,
    RoundMetrics,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    Support,
    TokenLogprobs,
    Verdict,
    VerifyRequest,
)

OpenReply = Opened | Progress | RoundError
VerifyReply = Verdict | Progress | RoundError
GenerateReply = GeneratedTokens | Progress | RoundError

_T = TypeVar("_T")
_METHOD_NUMBERS = {m: pb.Method.Value(f"METHOD_{m.name}") for m in Method}
_METHODS = {number: m for m, number in _METHOD_NUMBERS.items()} | {pb.METHOD_UNSPECIFIED: Method.COUPLED}
_ORIGIN_NUMBERS = {o: pb.Origin.Value(f"ORIGIN_{o.name}") for o in Origin}
_ORIGINS = {number: o for o, number in _ORIGIN_NUMBERS.items()}
_KIND_NUMBERS = {k: pb.CorrectionKind.Value(f"CORRECTION_KIND_{k.name}") for k in CorrectionKind}
_KINDS = {number: k for k, number in _KIND_NUMBERS.items()}
_ERROR_NUMBERS = {c: pb.RoundErrorCode.Value(f"ROUND_ERROR_CODE_{c.name}") for c in RoundErrorCode}
_ERRORS = {number: c for c, number in _ERROR_NUMBERS.items()}


# ------------------------------------------------------------------------------------ requests, out


def encode_request(request: SessionRequest) -> pb.SessionRequest:
    """One message of the `Session` stream."""
    match request:
        case VerifyRequest():
            return pb.SessionRequest(verify=encode_verify(request))
        case OpenRequest():
            return pb.SessionRequest(open=encode_open(request))
        case GenerateRequest():
            return pb.SessionRequest(generate=encode_generate(request))
        case CancelRequest():
            return pb.SessionRequest(cancel=pb.CancelRequest(round_id=request.round_id))
        case CloseRequest():
            return pb.SessionRequest(close=encode_close(request))


def encode_open(request: OpenRequest) -> pb.OpenRequest:
    return pb.OpenRequest(
        session_id=request.session_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=_encode_sampling(request.sampling),
        method=_METHOD_NUMBERS[request.method],
        method_params=_encode_method_params(request.method_params),
        tokenizer_fingerprint=request.tokenizer_fingerprint,
        target_fingerprint=request.target_fingerprint,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        num_logprobs=request.num_logprobs,
        origins_resent=request.is_rebuild,
        round_id=request.round_id,
    )


def encode_verify(request: VerifyRequest) -> pb.VerifyRequest:
    return pb.VerifyRequest(
        round_id=request.round_id,
        base_position=request.base_position,
        base_hash=request.base_hash,
        committed_tokens=request.committed_tokens,
        origins=[_ORIGIN_NUMBERS[o] for o in request.origins],
        draft_tokens=request.draft_tokens,
        q_token_probs=request.q_token_probs,
        hard_mask=request.hard_mask,
        q_support=[pb.Support(token_ids=s.token_ids, weights=s.weights) for s in request.q_support],
        parents=request.parents,
        candidates_from=request.candidates_from,
        pipelined=request.pipelined,
        session_id=request.session_id,
        deadline_ms=request.deadline_ms,
    )


def encode_generate(request: GenerateRequest) -> pb.GenerateRequest:
    mode = pb.GENERATE_MODE_CO_LOCATED if request.is_co_located else pb.GENERATE_MODE_CLOUD_ONLY
    return pb.GenerateRequest(
        round_id=request.round_id,
        base_position=request.base_position,
        base_hash=request.base_hash,
        committed_tokens=request.committed_tokens,
        origins=[_ORIGIN_NUMBERS[o] for o in request.origins],
        max_new_tokens=request.max_new_tokens,
        mode=mode,
        num_speculative_tokens=request.num_speculative_tokens,
        session_id=request.session_id,
    )


def encode_close(request: CloseRequest) -> pb.CloseRequest:
    return pb.CloseRequest(session_id=request.session_id)


def _encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=i, bias=b) for i, b in params.logit_bias],
        bad_words=[pb.TokenSequence(token_ids=ids) for ids in params.bad_words],
        seed=params.seed,
        min_new_tokens=params.min_new_tokens,
    )


def _encode_method_params(params: MethodParams) -> pb.MethodParams | None:
    if params == MethodParams():
        return None
    return pb.MethodParams(
        threshold_pass=params.threshold_pass,
        threshold_ratio=params.threshold_ratio,
        typical_epsilon=params.typical_epsilon,
        typical_delta=params.typical_delta,
        num_candidates=params.num_candidates,
    )


# ------------------------------------------------------------------------------------- requests, in


def decode_request(message: pb.SessionRequest) -> SessionRequest:
    """Raises `InvalidFieldError`."""
    match message.WhichOneof("body"):
        case "verify":
            return decode_verify(message.verify)
        case "open":
            return decode_open(message.open)
        case "generate":
            return decode_generate(message.generate)
        case "cancel":
            return CancelRequest(round_id=message.cancel.round_id)
        case "close":
            return CloseRequest(session_id=message.close.session_id)
        case _:
            raise InvalidFieldError("body", "empty message, or one of a newer protocol")


def decode_open(message: pb.OpenRequest) -> OpenRequest:
    return OpenRequest(
        session_id=message.session_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=_decode_sampling(message.sampling),
        method=_lookup(_METHODS, message.method, "method"),
        method_params=_decode_method_params(message.method_params),
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        target_fingerprint=message.target_fingerprint,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs,
        is_rebuild=message.origins_resent,
        round_id=message.round_id,
    )


def decode_verify(message: pb.VerifyRequest) -> VerifyRequest:
    request = VerifyRequest(
        round_id=message.round_id,
        base_position=message.base_position,
        base_hash=message.base_hash,
        committed_tokens=tuple(message.committed_tokens),
        origins=_decode_origins(message.origins),
        draft_tokens=tuple(message.draft_tokens),
        q_token_probs=tuple(message.q_token_probs),
        hard_mask=message.hard_mask,
        q_support=tuple(Support(tuple(s.token_ids), tuple(s.weights)) for s in message.q_support),
        parents=tuple(message.parents),
        candidates_from=message.candidates_from,
        pipelined=message.pipelined,
        session_id=message.session_id,
        deadline_ms=message.deadline_ms,
    )
    num_draft_tokens = len(request.draft_tokens)
    _check_length("origins", request.origins, len(request.committed_tokens), "committed token")
    _check_length("q_token_probs", request.q_token_probs, num_draft_tokens, "draft token")
    _check_length("q_support", request.q_support, num_draft_tokens, "draft token")
    _check_length("parents", request.parents, num_draft_tokens, "draft token")
    _check_length("hard_mask", request.hard_mask, (num_draft_tokens + 7) // 8, "eight draft tokens")
    for i, prob in enumerate(request.q_token_probs):
        if not 0.0 < prob <= 1.0:  # also false for NaN
            raise InvalidFieldError("q_token_probs", f"[{i}] is {prob}; it must be in (0, 1]")
    for i, support in enumerate(request.q_support):
        _check_support(i, support, request.draft_tokens[i])
    return request


def _check_support(i: int, support: Support, drafted: int) -> None:
    ids, weights = support.token_ids, support.weights
    if len(ids) != len(weights) or not 0 < len(ids) <= 64:
        raise InvalidFieldError(
            "q_support", f"[{i}] has {len(ids)} ids and {len(weights)} weights; want 1 to 64 of each"
        )
    if len(set(ids)) != len(ids) or sum(weights) == 0:
        raise InvalidFieldError("q_support", f"[{i}] repeats an id or has no weight")
    if drafted not in ids or weights[ids.index(drafted)] == 0:
        raise InvalidFieldError("q_support", f"[{i}] does not hold the drafted id {drafted}")


def decode_generate(message: pb.GenerateRequest) -> GenerateRequest:
    request = GenerateRequest(
        round_id=message.round_id,
        base_position=message.base_position,
        base_hash=message.base_hash,
        max_new_tokens=message.max_new_tokens,
        committed_tokens=tuple(message.committed_tokens),
        origins=_decode_origins(message.origins),
        is_co_located=message.mode == pb.GENERATE_MODE_CO_LOCATED,
        num_speculative_tokens=message.num_speculative_tokens,
        session_id=message.session_id,
    )
    _check_length("origins", request.origins, len(request.committed_tokens), "committed token")
    return request


def decode_close(message: pb.CloseRequest) -> CloseRequest:
    return CloseRequest(session_id=message.session_id)


def _decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        # A client that leaves these three out means "off", not zero.
        top_p=message.top_p if message.top_p != 0.0 else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.repetition_penalty != 0.0 else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((b.token_id, b.bias) for b in message.logit_bias),
        bad_words=tuple(tuple(s.token_ids) for s in message.bad_words),
        min_new_tokens=message.min_new_tokens,
        seed=message.seed,
    )


def _decode_method_params(message: pb.MethodParams) -> MethodParams:
    def value(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None

    num_candidates = message.num_candidates if message.HasField("num_candidates") else None
    return MethodParams(
        threshold_pass=value("threshold_pass"),
        threshold_ratio=value("threshold_ratio"),
        typical_epsilon=value("typical_epsilon"),
        typical_delta=value("typical_delta"),
        num_candidates=num_candidates,
    )


def _decode_origins(numbers: Sequence[int]) -> tuple[Origin, ...]:
    return tuple(_lookup(_ORIGINS, number, "origins") for number in numbers)


def _lookup(table: dict[int, _T], number: int, field: str) -> _T:
    try:
        return table[number]
    except KeyError:
        raise InvalidFieldError(field, f"unknown value {number}") from None


def _check_length(field: str, values: Sequence[object], expected: int, per: str) -> None:
    if len(values) not in (0, expected):
        raise InvalidFieldError(field, f"has {len(values)} entries; want none or {expected}, one per {per}")


# ----------------------------------------------------------------------------------- responses, out


def encode_response(
    response: SessionResponse, kind: type[SessionRequest] | None = None
) -> pb.SessionResponse:
    """One message of the `Session` stream; a `RoundError` or `Progress` answers a request of `kind`."""
    match response:
        case Verdict():
            return pb.SessionResponse(verify=encode_verify_response(response))
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


def encode_open_response(response: OpenReply) -> pb.OpenResponse:
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
            )
        )
    if isinstance(response, Progress):
        return pb.OpenResponse(progress=_encode_progress(response))
    return pb.OpenResponse(error=_encode_error(response))


def encode_verify_response(response: VerifyReply) -> pb.VerifyResponse:
    if isinstance(response, Verdict):
        verdict = pb.Verdict(
            round_id=response.round_id,
            accepted_len=response.accepted_len,
            accepted_nodes=response.accepted_nodes,
            correction=response.correction,
            correction_kind=_KIND_NUMBERS[response.correction_kind],
            position=response.position,
            hash=response.hash,
            candidates=[
                pb.Candidate(token_id=c.token_id, target_prob=c.target_prob) for c in response.candidates
            ],
            logprobs=[_encode_logprobs(entry) for entry in response.logprobs],
            metrics=_encode_metrics(response.metrics),
        )
        return pb.VerifyResponse(verdict=verdict)
    if isinstance(response, Progress):
        return pb.VerifyResponse(progress=_encode_progress(response))
    return pb.VerifyResponse(error=_encode_error(response))


def encode_generate_response(response: GenerateReply) -> pb.GenerateResponse:
    if isinstance(response, GeneratedTokens):
        tokens = pb.GeneratedTokens(
            round_id=response.round_id,
            token_ids=response.token_ids,
            origins=[_ORIGIN_NUMBERS[o] for o in response.origins],
            position=response.position,
            hash=response.hash,
            is_last=response.is_last,
            metrics=_encode_metrics(response.metrics),
            logprobs=[_encode_logprobs(entry) for entry in response.logprobs],
        )
        return pb.GenerateResponse(tokens=tokens)
    if isinstance(response, Progress):
        return pb.GenerateResponse(progress=_encode_progress(response))
    return pb.GenerateResponse(error=_encode_error(response))


def encode_closed(response: Closed) -> pb.CloseResponse:
    return pb.CloseResponse(was_open=response.was_open, position=response.position)


def encode_model_info(info: ModelInfo) -> pb.DescribeResponse:
    limits = pb.Limits(
        max_context=info.limits.max_context,
        max_draft_tokens=info.limits.max_draft_tokens,
        max_message_bytes=info.limits.max_message_bytes,
        max_sessions=info.limits.max_sessions,
        session_idle_ttl_ms=info.limits.session_idle_ttl_ms,
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
        methods=[_METHOD_NUMBERS[m] for m in info.methods],
        server_version=info.server_version,
        labels=info.labels,
    )


def _encode_metrics(metrics: RoundMetrics) -> pb.RoundMetrics:
    return pb.RoundMetrics(
        alpha_mean=metrics.alpha_mean,
        la_over_k=metrics.la_over_k,
        queue_ns=metrics.queue_ns,
        forward_ns=metrics.forward_ns,
        total_ns=metrics.total_ns,
        batch_size=metrics.batch_size,
    )


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
        code=_ERROR_NUMBERS[error.code],
        field=error.field,
        message=error.message,
        retry_after_ms=error.retry_after_ms,
        position=error.position,
        hash=error.hash,
    )


# ------------------------------------------------------------------------------------ responses, in


def decode_response(message: pb.SessionResponse) -> SessionResponse:
    """Raises `InvalidFieldError` for an empty message or one of a newer protocol."""
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
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("open", "empty message")


def decode_verify_response(message: pb.VerifyResponse) -> VerifyReply:
    match message.WhichOneof("body"):
        case "verdict":
            verdict = message.verdict
            return Verdict(
                round_id=verdict.round_id,
                accepted_len=verdict.accepted_len,
                correction=verdict.correction,
                correction_kind=_lookup(_KINDS, verdict.correction_kind, "correction_kind"),
                position=verdict.position,
                hash=verdict.hash,
                accepted_nodes=tuple(verdict.accepted_nodes),
                candidates=tuple(Candidate(c.token_id, c.target_prob) for c in verdict.candidates),
                logprobs=tuple(_decode_logprobs(entry) for entry in verdict.logprobs),
                metrics=_decode_metrics(verdict.metrics),
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("verify", "empty message")


def decode_generate_response(message: pb.GenerateResponse) -> GenerateReply:
    match message.WhichOneof("body"):
        case "tokens":
            tokens = message.tokens
            return GeneratedTokens(
                round_id=tokens.round_id,
                token_ids=tuple(tokens.token_ids),
                origins=_decode_origins(tokens.origins),
                position=tokens.position,
                hash=tokens.hash,
                is_last=tokens.is_last,
                metrics=_decode_metrics(tokens.metrics),
                logprobs=tuple(_decode_logprobs(entry) for entry in tokens.logprobs),
            )
        case "progress":
            return _decode_progress(message.progress)
        case "error":
            return _decode_error(message.error)
        case _:
            raise InvalidFieldError("generate", "empty message")


def decode_closed(message: pb.CloseResponse) -> Closed:
    return Closed(was_open=message.was_open, position=message.position)


def decode_model_info(message: pb.DescribeResponse) -> ModelInfo:
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
        methods=tuple(_METHODS[m] for m in message.methods if m in _METHODS),
        server_version=message.server_version,
        labels=tuple(message.labels),
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
        code=_ERRORS.get(message.code, RoundErrorCode.INTERNAL),
        message=message.message,
        field=message.field,
        retry_after_ms=message.retry_after_ms,
        position=message.position,
        hash=message.hash,
    )
