"""Computes the length of messages: the codec's own answer, cached by shape, which halves a simulation's time.

A shape is everything that the length depends on: how many items there are, how many bytes its numbers take.
Ids of the simulated text take three bytes each.
"""

from __future__ import annotations

from outrider.common import codec
from outrider.common.types import SessionRequest, SessionResponse, Verdict, VerifyRequest

_requests: dict[tuple[int, ...], int] = {}
_verdicts: dict[tuple[object, ...], int] = {}


def request_bytes(request: SessionRequest) -> int:
    """Returns the size of the message as protobuf."""
    if not isinstance(request, VerifyRequest) or request.q_support or request.parents:
        return int(codec.encode_request(request).ByteSize())
    shape = (
        len(request.draft_tokens),
        len(request.committed_tokens),
        len(request.q_token_probs),
        len(request.hard_mask),
        _varint(request.round_id),
        _varint(request.base_position),
        _varint(request.deadline_ms),
        request.candidates_from,
        request.pipelined,
    )
    found = _requests.get(shape)
    if found is None:
        found = _requests[shape] = codec.encode_request(request).ByteSize()
    return found


def response_bytes(response: SessionResponse, kind: type[SessionRequest] | None) -> int:
    """Returns the size of an answer to a request of `kind`."""
    if not isinstance(response, Verdict) or response.candidates or response.logprobs:
        return int(codec.encode_response(response, kind).ByteSize())
    metrics = response.metrics
    shape = (
        _varint(response.round_id),
        _varint(response.accepted_len),
        _varint(response.position),
        response.correction_kind,
        _varint(metrics.queue_ns),
        _varint(metrics.forward_ns),
        _varint(metrics.total_ns),
        _varint(metrics.batch_size),
        metrics.la_over_k == 0,  # zeros are not sent
        metrics.alpha_mean == 0,
    )
    found = _verdicts.get(shape)
    if found is None:
        found = _verdicts[shape] = codec.encode_response(response, kind).ByteSize()
    return found


def _varint(value: int) -> int:
    """Returns its bytes; 0 for a zero, which is not sent."""
    return (value.bit_length() + 6) // 7
