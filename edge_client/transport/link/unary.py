"""The messages of a session as separate calls, for networks that break streams.

Calls run in the background and put their answers into one queue, so a late answer still arrives.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import grpc

from outrider.common import codec
from outrider.common.errors import LinkError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    OpenRequest,
    SessionRequest,
    SessionResponse,
    VerifyRequest,
)
from outrider.edge_client.transport.link.base import Traffic, UnreadableAnswerError
from outrider.edge_client.transport.link.calls import CallSettings, decode_answer
from outrider.edge_client.transport.link.channel import close_later
from outrider.edge_client.transport.link.inbox import Inbox
from outrider.edge_client.transport.link.stream import FRAME_BYTES
from outrider.edge_client.transport.link.trace import ConnectionSpan

_SERVICE = "/outrider.v1.Verifier/"


class UnaryConnection:
    """`Connection` by separate calls, each in the background."""

    def __init__(self, channel: Any, call: CallSettings, traffic: Traffic, span: ConnectionSpan) -> None:
        self._channel = channel
        self._span = span
        self._settings = call
        self._address = call.address
        self._session_id = call.session_id
        self._traffic = traffic
        self._metadata = (*call.metadata, *span.metadata)
        self._inbox: Inbox[SessionResponse] = Inbox(call.clock)
        self.receive = self._inbox.take
        self.wake = self._inbox.wake
        self._calls = {name: channel.unary_unary(_SERVICE + name) for name in ("Open", "Verify", "Close")}
        self._generate = channel.unary_stream(_SERVICE + "Generate")
        self._generating: dict[int, Any] = {}  # round_id → call
        self._is_closed = False

    @property
    def queued_s(self) -> float:
        return self._inbox.queued_s

    def send(self, request: SessionRequest) -> None:
        match request:
            case OpenRequest():
                self._start("Open", codec.encode_open(request), pb.OpenResponse, codec.decode_open_response)
            case VerifyRequest():
                message = codec.encode_verify(replace(request, session_id=self._session_id))
                self._start("Verify", message, pb.VerifyResponse, codec.decode_verify_response)
            case CloseRequest():
                message = codec.encode_close(CloseRequest(self._session_id))
                self._start("Close", message, pb.CloseResponse, codec.decode_closed)
            case GenerateRequest():
                self._start_generate(replace(request, session_id=self._session_id))
            case CancelRequest():
                if (call := self._generating.pop(request.round_id, None)) is not None:
                    call.cancel()  # the verifier ends the round when its call ends
                    last = GeneratedTokens(request.round_id, (), (), 0, 0, is_last=True)
                    self._inbox.put(last)

    def start_rtt_probe(self) -> None:
        """Does nothing: no mode that needs it uses single calls."""

    def take_rtt(self) -> float | None:
        return None

    def close(self) -> None:
        self._is_closed = True
        close_later(self._channel)
        self._span.end()

    # --------------------------------------------------------------------------------------- calls

    def _start(self, name: str, message: Any, response_type: Any, decode: Any) -> None:
        data = message.SerializeToString()
        self._traffic.bytes_up += len(data) + FRAME_BYTES
        call = self._calls[name].future(data, metadata=self._metadata)
        call.add_done_callback(lambda done: self._finish(done, response_type, decode))

    def _finish(self, call: Any, response_type: Any, decode: Any) -> None:
        if self._is_closed:
            return
        try:
            self._put(call.result(), response_type, decode)
        except grpc.FutureCancelledError:
            self._inbox.fail(LinkError(f"a call to {self._address} was cancelled"))
        except grpc.RpcError as error:
            self._inbox.fail(self._settings.translate(error))

    def _start_generate(self, request: GenerateRequest) -> None:
        data = codec.encode_generate(request).SerializeToString()
        self._traffic.bytes_up += len(data) + FRAME_BYTES
        call = self._generate(data, metadata=self._metadata)
        self._generating[request.round_id] = call
        reader = threading.Thread(
            target=self._read, args=(call, request.round_id), name="edge-link-reader", daemon=True
        )
        reader.start()

    def _read(self, call: Any, round_id: int) -> None:
        try:
            for data in call:
                self._put(data, pb.GenerateResponse, codec.decode_generate_response)
        except grpc.RpcError as error:
            if round_id in self._generating and not self._is_closed:
                self._inbox.fail(self._settings.translate(error))
        finally:
            self._generating.pop(round_id, None)

    def _put(self, data: bytes, response_type: Any, decode: Any) -> None:
        self._traffic.bytes_down += len(data) + FRAME_BYTES
        try:
            self._inbox.put(decode_answer(self._address, data, response_type, decode))
        except UnreadableAnswerError as error:
            self._inbox.fail(error)
