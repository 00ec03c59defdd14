"""The hot path: everything of a session on one bidirectional stream.

A stream's own deadline would cover the whole stream, so it has none: one reader thread feeds a queue,
and `receive` waits on that queue with the round's deadline. The stream begins with the first message: a newer
stream supersedes a session's older one, which a connection held in reserve must not do.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from outrider.common import codec
from outrider.common.errors import InvalidFieldError, LinkError, OutriderError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import SessionRequest, SessionResponse
from outrider.edge_client.transport.link.base import CallRejectedError, Traffic
from outrider.edge_client.transport.link.calls import CallSettings
from outrider.edge_client.transport.link.trace import ConnectionSpan

METHOD = "/outrider.v1.Verifier/Session"
DESCRIBE = "/outrider.v1.Verifier/Describe"
FRAME_BYTES = 5  # gRPC's prefix of every message


class StreamConnection:
    def __init__(self, channel: Any, call: CallSettings, traffic: Traffic, span: ConnectionSpan) -> None:
        self._channel = channel
        self._span = span
        self._settings = call
        self._address = call.address
        self._traffic = traffic
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._inbox: SimpleQueue[tuple[bytes, float] | OutriderError | None] = SimpleQueue()
        self.lay_here_s = 0.0
        self._lost: OutriderError | None = None
        self._trip_s: float | None = None
        self._call: Any = None

    def send(self, request: SessionRequest) -> None:
        if self._lost is not None:
            raise self._lost
        message = codec.encode_request(request).SerializeToString()
        self._traffic.bytes_up += len(message) + FRAME_BYTES
        self._outbox.put(message)
        if self._call is None:
            self._begin()

    def receive(self, timeout_s: float) -> SessionResponse | None:
        if self._lost is not None:
            raise self._lost
        try:
            item = self._inbox.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if item is None:
            return None
        if isinstance(item, OutriderError):
            self._lost = item
            raise item
        message, arrived_s = item
        self.lay_here_s = time.monotonic() - arrived_s
        self._traffic.bytes_down += len(message) + FRAME_BYTES
        try:
            return codec.decode_response(pb.SessionResponse.FromString(message))
        except InvalidFieldError as error:
            raise CallRejectedError(f"{self._address} answers what this edge cannot read: {error}") from error

    def start_trip(self) -> None:
        """By a `Describe` on the same connection, which waits for no step of the verifier."""
        start_s = time.monotonic()
        call = self._channel.unary_unary(DESCRIBE).future(b"", metadata=self._settings.metadata)
        call.add_done_callback(lambda done: self._end_trip(done, time.monotonic() - start_s))

    def _end_trip(self, call: Any, trip_s: float) -> None:
        if not call.cancelled() and call.exception() is None:
            self._trip_s = trip_s

    def take_trip(self) -> float | None:
        trip_s, self._trip_s = self._trip_s, None
        return trip_s

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        self._channel.close()
        self._span.end()

    def _begin(self) -> None:
        method = self._channel.stream_stream(METHOD)  # bytes in, bytes out: the codec runs in the caller
        metadata = (*self._settings.metadata, *self._span.metadata)
        self._call = method(iter(self._outbox.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="edge-link-reader", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._inbox.put((message, time.monotonic()))
            self._inbox.put(LinkError(f"{self._address} ended the stream"))
        except grpc.RpcError as error:
            self._inbox.put(self._settings.translate(error))
