"""Measures a verifier over one connection: its model, its round trip and its clock."""

from __future__ import annotations

import secrets
import time  # for the wall clock, which is compared with the verifier's
from dataclasses import dataclass

import grpc

from outrider.common import codec
from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import ModelInfo
from outrider.edge_client.transport.link.balancing import SESSION_HEADER
from outrider.edge_client.transport.link.calls import decode_answer
from outrider.edge_client.transport.link.channel import close_later, open_channel, translate
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity

_TIME_KEY = "x-outrider-time-ms"


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe`. `answers_ms` are the times of the calls on the open connection, in order;
    `clock_ahead_ms` is how far the verifier's clock is ahead of ours, None where it does not send it."""

    model: ModelInfo
    connect_ms: float
    answers_ms: tuple[float, ...]
    clock_ahead_ms: float | None


def probe(
    address: str,
    security: LinkSecurity = PLAINTEXT,
    *,
    count: int = 8,
    timeout_s: float = 5.0,
    session_id: bytes | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Probe:
    """Calls `Describe` `count` times. Raises `LinkError` and `CallRejectedError` as a session's opening would."""
    session_id = session_id or secrets.token_bytes(16)  # so that one of several verifiers answers throughout
    start_s = clock.now()
    channel = open_channel(address, timeout_s, security, session_id)
    connect_ms = (clock.now() - start_s) * 1e3
    call = channel.unary_unary("/outrider.v1.Verifier/Describe")
    answers_ms: list[float] = []
    ahead: float | None = None
    try:
        for _ in range(count):
            sent_ms, start_s = time.time() * 1e3, clock.now()
            metadata = ((SESSION_HEADER, session_id.hex()), *security.metadata())
            answer, finished = call.with_call(b"", timeout=timeout_s, metadata=metadata)
            took_ms = (clock.now() - start_s) * 1e3
            sent_back = dict(finished.trailing_metadata() or ()).get(_TIME_KEY, "")
            if str(sent_back).isdecimal() and (not answers_ms or took_ms <= min(answers_ms)):
                ahead = float(sent_back) - (sent_ms + took_ms / 2)  # the quickest call is the most exact
            answers_ms.append(took_ms)
    except grpc.RpcError as error:
        raise translate(error, address) from error
    finally:
        close_later(channel)
    model = decode_answer(address, answer, pb.DescribeResponse, codec.decode_model_info)
    return Probe(model, connect_ms, tuple(answers_ms), ahead)
