"""The hot path: everything of a session on one bidirectional stream.

A stream's own deadline would cover the whole stream, so it has none: one reader thread feeds a queue,
and `receive` waits on that queue with the round's deadline. The stream begins with the first message: a newer
stream supersedes a session's older one, which a connection held in reserve must not do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from outrider.common import codec
from outrider.common.errors import LinkError, OutriderError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import SessionRequest, SessionResponse
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.link.calls import CallSettings, decode_answer
from outrider.edge_client.transport.link.channel import close_later
from outrider.edge_client.transport.link.inbox import Inbox
from outrider.edge_client.transport.link.trace import ConnectionSpan

METHOD = "/outrider.v1.Verifier/Session"
DESCRIBE = "/outrider.v1.Verifier/Describe"
FRAME_BYTES = 5  # gRPC's prefix of every message
# For which `send` waits for its message to leave. gRPC's threads need the interpreter for that, and would wait for
# whatever the caller does next.
LEAVING_S = 0.001


class StreamConnection:
    """`Connection` over one `Session` stream."""

    def __init__(self, channel: Any, call: CallSettings, traffic: Traffic, span: ConnectionSpan) -> None:
        self._channel = channel
        self._span = span
        self._settings = call
        self._address = call.address
        self._traffic = traffic
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._has_left = threading.Event()
        self._inbox: Inbox[bytes] = Inbox(call.clock)
        self._lost: OutriderError | None = None
        self._rtt_s: float | None = None
        self._call: Any = None
        self.wake = self._inbox.wake

    @property
    def queued_s(self) -> float:
        return self._inbox.queued_s

    def send(self, request: SessionRequest) -> None:
        if self._lost is not None:
            raise self._lost
        message = codec.encode_request(request).SerializeToString()
        self._traffic.bytes_up += len(message) + FRAME_BYTES
        self._has_left.clear()
        self._outbox.put(message)
        if self._call is None:
            self._begin()
        self._has_left.wait(LEAVING_S)

    def receive(self, timeout_s: float) -> SessionResponse | None:
        if self._lost is not None:
            raise self._lost
        try:
            message = self._inbox.take(timeout_s)
        except OutriderError as error:
            self._lost = error
            raise
        if message is None:
            return None
        self._traffic.bytes_down += len(message) + FRAME_BYTES
        return decode_answer(self._address, message, pb.SessionResponse, codec.decode_response)

    def start_rtt_probe(self) -> None:
        """Sends a `Describe` on the same connection, which waits for no step of the verifier."""
        start_s = self._settings.clock.now()
        call = self._channel.unary_unary(DESCRIBE).future(b"", metadata=self._settings.metadata)
        call.add_done_callback(lambda done: self._end_probe(done, self._settings.clock.now() - start_s))

    def _end_probe(self, call: Any, rtt_s: float) -> None:
        if not call.cancelled() and call.exception() is None:
            self._rtt_s = rtt_s

    def take_rtt(self) -> float | None:
        rtt_s, self._rtt_s = self._rtt_s, None
        return rtt_s

    def close(self) -> None:
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        close_later(self._channel)
        self._span.end()

    def _begin(self) -> None:
        method = self._channel.stream_stream(METHOD)  # bytes in, bytes out: the codec runs in the caller
        metadata = (*self._settings.metadata, *self._span.metadata)
        self._call = method(self._requests(), metadata=metadata)
        threading.Thread(target=self._read, name="edge-link-reader", daemon=True).start()

    def _requests(self) -> Iterator[bytes]:
        """Yields what is sent, on a thread of gRPC's, which asks for the next when one has left."""
        while (message := self._outbox.get()) is not None:
            yield message
            self._has_left.set()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._inbox.put(message)
            self._inbox.fail(LinkError(f"{self._address} ended the stream"))
        except grpc.RpcError as error:
            self._inbox.fail(self._settings.translate(error))
