"""Decodes requests. All decoders raise `InvalidFieldError` for a malformed field (see the package)."""

from __future__ import annotations

from outrider.common.codec.tables import (
    METHODS,
    check_length,
    decode_origins,
    lookup,
)
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    GenerateRequest,
    MethodParams,
    OpenRequest,
    SamplingParams,
    SessionRequest,
    Support,
    VerifyRequest,
)


def decode_request(message: pb.SessionRequest) -> SessionRequest:
    """Decodes one message of the `Session` stream."""
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
    """Decodes an opening."""
    return OpenRequest(
        session_id=message.session_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=_decode_sampling(message.sampling),
        method=lookup(METHODS, message.method, "method"),
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
    """Decodes a round, and checks lengths, probabilities and supports."""
    # The hot path: a slice of a repeated field costs half of iterating it, and most fields are empty.
    origins, supports = message.origins, message.q_support
    request = VerifyRequest(
        message.round_id,
        message.base_position,
        message.base_hash,
        tuple(message.committed_tokens[:]),
        decode_origins(origins) if origins else (),
        tuple(message.draft_tokens[:]),
        tuple(message.q_token_probs[:]),
        message.hard_mask,
        tuple([Support(tuple(s.token_ids), tuple(s.weights)) for s in supports]) if supports else (),
        tuple(message.parents[:]),
        message.candidates_from,
        message.pipelined,
        message.session_id,
        message.deadline_ms,
    )
    num_draft_tokens = len(request.draft_tokens)
    check_length("origins", request.origins, len(request.committed_tokens), "committed token")
    check_length("q_token_probs", request.q_token_probs, num_draft_tokens, "draft token")
    if request.q_support or request.parents or request.hard_mask:
        check_length("q_support", request.q_support, num_draft_tokens, "draft token")
        check_length("parents", request.parents, num_draft_tokens, "draft token")
        check_length("hard_mask", request.hard_mask, (num_draft_tokens + 7) // 8, "eight draft tokens")
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
    """Decodes a request for cloud-only or co-located tokens."""
    request = GenerateRequest(
        round_id=message.round_id,
        base_position=message.base_position,
        base_hash=message.base_hash,
        max_new_tokens=message.max_new_tokens,
        committed_tokens=tuple(message.committed_tokens),
        origins=decode_origins(message.origins),
        is_co_located=message.mode == pb.GENERATE_MODE_CO_LOCATED,
        num_speculative_tokens=message.num_speculative_tokens,
        session_id=message.session_id,
    )
    check_length("origins", request.origins, len(request.committed_tokens), "committed token")
    return request


def decode_close(message: pb.CloseRequest) -> CloseRequest:
    """Decodes a close."""
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
