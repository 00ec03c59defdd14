"""Encodes requests. Trusts our own dataclasses."""

from __future__ import annotations

from outrider.common.codec.tables import (
    GRAMMAR_KIND_NUMBERS,
    METHOD_NUMBERS,
    ORIGIN_NUMBERS,
)
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    GenerateRequest,
    Grammar,
    MethodParams,
    OpenRequest,
    SamplingParams,
    SessionRequest,
    VerifyRequest,
)


def encode_request(request: SessionRequest) -> pb.SessionRequest:
    """Encodes one message of the `Session` stream."""
    match request:
        case VerifyRequest():
            message = pb.SessionRequest()
            _fill_verify(message.verify, request)
            return message
        case OpenRequest():
            return pb.SessionRequest(open=encode_open(request))
        case GenerateRequest():
            return pb.SessionRequest(generate=encode_generate(request))
        case CancelRequest():
            return pb.SessionRequest(cancel=pb.CancelRequest(round_id=request.round_id))
        case CloseRequest():
            return pb.SessionRequest(close=encode_close(request))


def encode_open(request: OpenRequest) -> pb.OpenRequest:
    """Encodes an opening."""
    return pb.OpenRequest(
        session_id=request.session_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=_encode_sampling(request.sampling),
        method=METHOD_NUMBERS[request.method],
        method_params=_encode_method_params(request.method_params),
        tokenizer_fingerprint=request.tokenizer_fingerprint,
        target_fingerprint=request.target_fingerprint,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        num_logprobs=request.num_logprobs,
        origins_resent=request.is_rebuild,
        round_id=request.round_id,
        draft_source=request.draft_source,
        num_prompt_choices=request.num_prompt_choices,
    )


def encode_verify(request: VerifyRequest) -> pb.VerifyRequest:
    """Encodes a round."""
    message = pb.VerifyRequest()
    _fill_verify(message, request)
    return message


def _fill_verify(message: pb.VerifyRequest, request: VerifyRequest) -> None:
    """Fills a message in place: one passed to another's constructor would be copied. The hot path."""
    message.round_id = request.round_id
    message.base_position = request.base_position
    message.base_hash = request.base_hash
    message.committed_tokens.extend(request.committed_tokens)
    if request.origins:
        message.origins.extend([ORIGIN_NUMBERS[o] for o in request.origins])
    message.draft_tokens.extend(request.draft_tokens)
    message.q_token_probs.extend(request.q_token_probs)
    message.hard_mask = request.hard_mask
    for support in request.q_support:
        message.q_support.add(token_ids=support.token_ids, weights=support.weights)
    if request.parents:
        message.parents.extend(request.parents)
    message.candidates_from = request.candidates_from
    message.pipelined = request.pipelined
    message.session_id = request.session_id
    message.deadline_ms = request.deadline_ms


def encode_generate(request: GenerateRequest) -> pb.GenerateRequest:
    """Encodes a request for cloud-only or co-located tokens."""
    mode = pb.GENERATE_MODE_CO_LOCATED if request.is_co_located else pb.GENERATE_MODE_CLOUD_ONLY
    return pb.GenerateRequest(
        round_id=request.round_id,
        base_position=request.base_position,
        base_hash=request.base_hash,
        committed_tokens=request.committed_tokens,
        origins=[ORIGIN_NUMBERS[o] for o in request.origins],
        max_new_tokens=request.max_new_tokens,
        mode=mode,
        num_speculative_tokens=request.num_speculative_tokens,
        is_tree=request.is_tree,
        session_id=request.session_id,
    )


def encode_close(request: CloseRequest) -> pb.CloseRequest:
    """Encodes a close."""
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
        grammar=_encode_grammar(params.grammar),
    )


def _encode_grammar(grammar: Grammar | None) -> pb.Grammar | None:
    if grammar is None:
        return None
    kind = GRAMMAR_KIND_NUMBERS[grammar.kind]
    return pb.Grammar(kind=kind, text=grammar.text, has_whitespace=grammar.has_whitespace)


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
