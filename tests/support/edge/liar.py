"""A gRPC server that answers as `FakeVerifier` does, with each answer spoilt on its way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from support.edge.edge_fakes import FakeVerifier

from outrider.common import codec
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import SessionRequest

Spoil = Callable[[pb.SessionResponse, FakeVerifier], bytes | None]
"""Changes an answer, or returns the bytes to send in its place."""


class Liar:
    """Serves `Session`, and the single calls of a session, of one honest verifier."""

    def __init__(self, spoil: Spoil) -> None:
        self.verifier = FakeVerifier()
        self._spoil = spoil

    def session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for data in requests:
            request = codec.decode_request(pb.SessionRequest.FromString(data))
            for message, replaced in self._answers(request):
                yield message.SerializeToString() if replaced is None else replaced

    def single(
        self, message_type: Any, decode: Callable[[Any], SessionRequest], body: str
    ) -> Callable[..., Any]:
        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            for message, replaced in self._answers(decode(message_type.FromString(data))):
                yield getattr(message, body).SerializeToString() if replaced is None else replaced

        return answer

    def _answers(self, request: SessionRequest) -> Iterator[tuple[pb.SessionResponse, bytes | None]]:
        for reply in self.verifier.answer(request):
            message = codec.encode_response(reply, type(request))
            yield message, self._spoil(message, self.verifier)


@contextmanager
def lying(spoil: Spoil) -> Iterator[int]:
    """Serves on loopback; gives the port."""
    liar = Liar(spoil)
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler

    def first(answer: Callable[..., Iterator[bytes]]) -> Any:
        return unary(lambda data, context: next(answer(data, context)))

    handlers = {
        "Session": grpc.stream_stream_rpc_method_handler(liar.session),
        "Open": first(liar.single(pb.OpenRequest, codec.decode_open, "open")),
        "Verify": first(liar.single(pb.VerifyRequest, codec.decode_verify, "verify")),
        "Close": first(liar.single(pb.CloseRequest, codec.decode_close, "close")),
        "Generate": stream(liar.single(pb.GenerateRequest, codec.decode_generate, "generate")),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.Verifier", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
