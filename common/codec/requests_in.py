"""Decodes requests. All decoders raise `InvalidFieldError` for a malformed field (see the package).

With `limits`, lists that are too long are rejected before they are copied: a decoded list is up to twenty times
as large as its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from google.protobuf.message import DecodeError, Message

from outrider.common.codec.tables import (
    GRAMMAR_KINDS,
    METHODS,
    check_length,
    decode_origins,
    lookup,
)
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.tree import Tree, check_parents
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    GenerateRequest,
    Grammar,
    Limits,
    MethodParams,
    OpenRequest,
    SamplingParams,
    SessionRequest,
    Support,
    VerifyRequest,
)

_M = TypeVar("_M", bound=Message)
_SESSION_ID_BYTES = 16
_FINGERPRINT_BYTES = 256  # four times what ours have
_SOURCE_BYTES = 64
_MAX_WORD_IDS = 64  # a round walks back so far from each of its tokens


def parse(kind: type[_M], content: bytes) -> _M:
    """Returns a message from its bytes. Raises `InvalidFieldError` where they are none."""
    try:
        return cast(_M, kind.FromString(content))
    except DecodeError as error:
        raise InvalidFieldError("body", f"the bytes are no {kind.__name__}") from error


def decode_request(message: pb.SessionRequest, limits: Limits | None = None) -> SessionRequest:
    """Decodes one message of the `Session` stream."""
    match message.WhichOneof("body"):
        case "verify":
            return decode_verify(message.verify, limits)
        case "open":
            return decode_open(message.open, limits)
        case "generate":
            return decode_generate(message.generate, limits)
        case "cancel":
            return CancelRequest(round_id=message.cancel.round_id)
        case "close":
            return decode_close(message.close)
        case _:
            raise InvalidFieldError("body", "empty message, or one of a newer protocol")


def decode_open(message: pb.OpenRequest, limits: Limits | None = None) -> OpenRequest:
    """Decodes an opening."""
    _check_bytes("session_id", message.session_id, _SESSION_ID_BYTES)
    for field in ("tokenizer_fingerprint", "target_fingerprint"):
        _check_bytes(field, getattr(message, field), _FINGERPRINT_BYTES)
    _check_bytes("draft_source", message.draft_source, _SOURCE_BYTES)
    if limits is not None:
        of_what = "tokens of a context: shorten the prompt"
        _check_at_most("token_ids", len(message.token_ids), limits.max_context, of_what)
        _check_sampling_ids(message, limits.max_sampling_ids)
        _check_grammar(message.sampling, limits.max_grammar_bytes)
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
        draft_source=message.draft_source,
        num_prompt_choices=message.num_prompt_choices,
    )


def decode_verify(message: pb.VerifyRequest, limits: Limits | None = None) -> VerifyRequest:
    """Decodes a round, and checks lengths, probabilities and supports."""
    # The hot path: a slice of a repeated field costs half of iterating it, and most fields are empty.
    origins, supports, drafted = message.origins, message.q_support, message.draft_tokens
    num_draft_tokens, num_committed_tokens = len(drafted), len(message.committed_tokens)
    if limits is not None:
        if not message.parents:
            _check_at_most("draft_tokens", num_draft_tokens, limits.max_draft_tokens, "a round")
        _check_at_most("committed_tokens", num_committed_tokens, limits.max_context, "tokens of a context")
    check_length("origins", origins, num_committed_tokens, "committed token")
    check_length("q_token_probs", message.q_token_probs, num_draft_tokens, "draft token")
    if supports or message.parents or message.hard_mask or message.session_id:
        if message.parents:
            check_parents(message.parents, drafted, len(drafted) if limits is None else limits.max_tree_nodes)
            _check_tree_supports(message)
        else:
            check_length("q_support", supports, num_draft_tokens, "draft token")
        check_length("hard_mask", message.hard_mask, (num_draft_tokens + 7) // 8, "eight draft tokens")
        _check_bytes("session_id", message.session_id, _SESSION_ID_BYTES)
    request = VerifyRequest(
        message.round_id,
        message.base_position,
        message.base_hash,
        tuple(message.committed_tokens[:]),
        decode_origins(origins) if origins else (),
        tuple(drafted[:]),
        tuple(message.q_token_probs[:]),
        message.hard_mask,
        _decode_supports(message) if supports else (),
        tuple(message.parents[:]),
        message.candidates_from,
        message.pipelined,
        message.session_id,
        message.deadline_ms,
    )
    for i, prob in enumerate(request.q_token_probs):
        if not 0.0 < prob <= 1.0:  # also false for NaN
            raise InvalidFieldError("q_token_probs", f"[{i}] is {prob}; it must be in (0, 1]")
    return request


def _check_tree_supports(message: pb.VerifyRequest) -> None:
    internal = Tree(message.parents).internal
    check_length("q_support", message.q_support, len(internal), "node with children, the root first")


def _decode_supports(message: pb.VerifyRequest) -> tuple[Support, ...]:
    drafted, supports = message.draft_tokens, message.q_support
    if not message.parents:
        return tuple([_decode_support(i, s, drafted[i : i + 1]) for i, s in enumerate(supports)])
    tree = Tree(message.parents)
    children = ([drafted[child] for child in tree.children(node)] for node in tree.internal)
    return tuple([_decode_support(i, *each) for i, each in enumerate(zip(supports, children, strict=True))])


def _decode_support(i: int, message: pb.Support, drafted: Sequence[int]) -> Support:
    num_ids, num_weights = len(message.token_ids), len(message.weights)
    if num_ids != num_weights or not 0 < num_ids <= 64:
        raise InvalidFieldError(
            "q_support", f"[{i}] has {num_ids} ids and {num_weights} weights; want 1 to 64 of each"
        )
    ids, weights = tuple(message.token_ids), tuple(message.weights)
    if len(set(ids)) != len(ids) or sum(weights) == 0:
        raise InvalidFieldError("q_support", f"[{i}] repeats an id or has no weight")
    for token_id in drafted:
        if token_id not in ids or weights[ids.index(token_id)] == 0:
            raise InvalidFieldError("q_support", f"[{i}] does not hold the drafted id {token_id}")
    return Support(ids, weights)


def decode_generate(message: pb.GenerateRequest, limits: Limits | None = None) -> GenerateRequest:
    """Decodes a request for cloud-only or co-located tokens."""
    _check_bytes("session_id", message.session_id, _SESSION_ID_BYTES)
    num_committed_tokens = len(message.committed_tokens)
    if limits is not None:
        _check_at_most("committed_tokens", num_committed_tokens, limits.max_context, "tokens of a context")
    check_length("origins", message.origins, num_committed_tokens, "committed token")
    return GenerateRequest(
        round_id=message.round_id,
        base_position=message.base_position,
        base_hash=message.base_hash,
        max_new_tokens=message.max_new_tokens,
        committed_tokens=tuple(message.committed_tokens),
        origins=decode_origins(message.origins),
        is_co_located=message.mode == pb.GENERATE_MODE_CO_LOCATED,
        num_speculative_tokens=message.num_speculative_tokens,
        is_tree=message.is_tree,
        session_id=message.session_id,
    )


def decode_close(message: pb.CloseRequest, limits: Limits | None = None) -> CloseRequest:
    """Decodes a close, which no limit concerns."""
    _check_bytes("session_id", message.session_id, _SESSION_ID_BYTES)
    return CloseRequest(session_id=message.session_id)


def _check_bytes(field: str, value: bytes | str, most: int) -> None:
    if len(value) > most:
        raise InvalidFieldError(field, f"has {len(value)} bytes; at most {most}")


def _check_at_most(field: str, number: int, most: int, of_what: str) -> None:
    if number > most:
        raise InvalidFieldError(field, f"{number} of them; at most {most} {of_what}")


def _check_sampling_ids(message: pb.OpenRequest, most: int) -> None:
    """Bounds what every round of the session looks at. Words are counted only where they are not too many."""
    if not most:
        return
    sampling = message.sampling
    numbers = {
        "stop_token_ids": len(message.stop_token_ids),
        "sampling.logit_bias": len(sampling.logit_bias),
        "sampling.bad_words": len(sampling.bad_words),
    }
    if sum(numbers.values()) <= most:
        numbers["sampling.bad_words"] = sum(len(word.token_ids) for word in sampling.bad_words)
    if sum(numbers.values()) > most:
        field = max(numbers, key=lambda name: numbers[name])
        together = f"stop_token_ids, logit_bias and bad_words have at most {most} together"
        raise InvalidFieldError(
            field, f"has {numbers[field]} ids; {together} (the verifier's --max-sampling-ids)"
        )
    if numbers["sampling.bad_words"] > most // 4:
        raise InvalidFieldError(
            "sampling.bad_words",
            f"has {numbers['sampling.bad_words']} ids; at most {most // 4}, a quarter of --max-sampling-ids",
        )
    for word in sampling.bad_words:
        _check_at_most("sampling.bad_words", len(word.token_ids), _MAX_WORD_IDS, "ids a word")


def _check_grammar(message: pb.SamplingParams, most: int) -> None:
    num_bytes = (
        len(message.grammar.text.encode()) if most else 0
    )  # a verifier without grammars refuses each by name
    if num_bytes > most:
        raise InvalidFieldError(
            "sampling.grammar", f"has {num_bytes} bytes; at most {most} (the verifier's --max-grammar-bytes)"
        )


def _decode_grammar(message: pb.SamplingParams) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    kind = lookup(GRAMMAR_KINDS, message.grammar.kind, "sampling.grammar")
    if not message.grammar.text:
        raise InvalidFieldError("sampling.grammar", "is empty")
    return Grammar(kind, message.grammar.text, message.grammar.has_whitespace)


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
        grammar=_decode_grammar(message),
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
