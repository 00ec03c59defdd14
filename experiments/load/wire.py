"""As much of HTTP/2 and gRPC as a load generator needs: message streams over one connection, cheaply.

grpc.aio takes 180 µs of a core for a round trip, nearly what the verifier takes: on two cores the generator
would be measured. Here all messages of one turn of the event loop leave in one write, 30 µs a round trip. The
peer is a full gRPC server and sees ordinary streams. Its headers are not decoded: a stream that ends early
gives no status. A stream has one message under way, so only the connection's flow-control window is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Sequence

from outrider.common.errors import LinkError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE = 4  # a setting
CANCEL = 8  # an error code
DEFAULT_WINDOW, MAX_WINDOW = 65_535, (1 << 31) - 1
CONNECT_TIMEOUT_S = 10.0


class StreamLost(Exception):
    """Is raised when the verifier ended the stream, or does not answer as the protocol says."""


class WireStream:
    """Is one call: `write` queues a message, `read` awaits the next one."""

    def __init__(self, connection: WireConnection, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._inbox: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._partial = b""
        self._lost = ""

    def write(self, message: bytes) -> None:
        """Raises `StreamLost` when the stream is over."""
        if self._lost:
            raise StreamLost(self._lost)
        body = b"\0" + len(message).to_bytes(4, "big") + message
        self._connection.send_data(self._stream_id, body)

    async def read(self) -> bytes:
        """Raises `StreamLost` when the stream is over and everything was read."""
        while not self._inbox:
            if self._lost:
                raise StreamLost(self._lost)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    def done_writing(self) -> None:
        """Ends this side of the stream."""
        self._connection.send_frame(DATA, END_STREAM, self._stream_id, b"")

    def cancel(self) -> None:
        """Drops the stream without a word, as a client that dies does."""
        self._connection.send_frame(RST_STREAM, 0, self._stream_id, CANCEL.to_bytes(4, "big"))
        self.end("cancelled here")

    # ------------------------------------------------------------------------ from the connection

    def take(self, data: bytes) -> None:
        """Takes data of the stream, as far as a message or beyond."""
        data = self._partial + data
        while len(data) >= 5 and len(data) >= (size := 5 + int.from_bytes(data[1:5], "big")):
            self._inbox.append(data[5:size])
            data = data[size:]
        self._partial = data
        self._wake()

    def end(self, why: str) -> None:
        """Ends the stream for a reason."""
        self._lost = self._lost or why
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WireConnection(asyncio.Protocol):
    """Multiplexes calls on one TCP connection; made by `connect`. `receive_window`: bytes a stream may
    send us, never renewed."""

    def __init__(self, authority: str, receive_window: int) -> None:
        self._authority = authority
        self._receive_window = receive_window
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, WireStream] = {}
        self._next_id = 1
        self._received = b""
        self._outgoing: list[bytes] = []
        self._blocked: deque[tuple[int, bytes]] = deque()  # data that waits for the peer's window
        self._window = DEFAULT_WINDOW
        self._is_flush_due = False

    def open_stream(self, path: str, metadata: Sequence[tuple[str, str]]) -> WireStream:
        """Starts a call."""
        headers = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        )
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = self._streams[stream_id] = WireStream(self, stream_id)
        block = b"".join(b"\0" + _string(name) + _string(value) for name, value in headers)
        self.send_frame(HEADERS, END_HEADERS, stream_id, block)
        return stream

    def send_data(self, stream_id: int, body: bytes) -> None:
        """Sends a message, or queues it until the peer's window allows it."""
        if self._blocked or len(body) > self._window:
            self._blocked.append((stream_id, body))
            return
        self._window -= len(body)
        for start in range(0, len(body), 16_384):
            self.send_frame(DATA, 0, stream_id, body[start : start + 16_384])

    def send_frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        """Queues a frame; all of one turn of the event loop leave in one write."""
        self._outgoing.append(struct.pack(">IBI", len(body) << 8 | kind, flags, stream_id) + body)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def close(self) -> None:
        """Sends what is queued and closes the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the preface and the settings."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._outgoing.append(PREFACE)
        self.send_frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, self._receive_window))
        self.send_frame(WINDOW_UPDATE, 0, 0, (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big"))

    def data_received(self, data: bytes) -> None:
        """Handles every whole frame."""
        data = self._received + data if self._received else data
        start = 0
        while len(data) - start >= 9:
            head, flags, stream_id = struct.unpack_from(">IBI", data, start)
            stop = start + 9 + (head >> 8)
            if stop > len(data):
                break
            self._take_frame(head & 0xFF, flags, stream_id & MAX_WINDOW, data[start + 9 : stop])
            start = stop
        self._received = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every stream."""
        for stream in self._streams.values():
            stream.end("the connection was lost")

    def _take_frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        stream = self._streams.get(stream_id)
        if kind == DATA and stream is not None:
            stream.take(body)
        elif kind == WINDOW_UPDATE and stream_id == 0:
            self._window += int.from_bytes(body, "big")
            blocked, self._blocked = self._blocked, deque()
            for blocked_id, message in blocked:
                self.send_data(blocked_id, message)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.send_frame(kind, ACK, 0, body if kind == PING else b"")
        elif kind == GOAWAY:
            for each in self._streams.values():
                each.end("the verifier is going away")
        if stream is not None and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)):
            stream.end("the verifier ended the stream")
            del self._streams[stream_id]


def _string(text: str) -> bytes:
    """Encodes as HPACK a literal of at most 126 bytes, not compressed."""
    data = text.encode()
    assert len(data) < 127, f"a header of {len(data)} bytes"
    return len(data).to_bytes(1, "big") + data


async def connect(address: str, receive_window: int = MAX_WINDOW) -> WireConnection:
    """Raises `LinkError`. A small `receive_window` makes streams of a client that stops reading."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()

    def make() -> WireConnection:
        return WireConnection(address, receive_window)

    with contextlib.suppress(OSError, TimeoutError):
        _, connection = await asyncio.wait_for(
            loop.create_connection(make, host.strip("[]"), int(port)), CONNECT_TIMEOUT_S
        )
        return connection
    raise LinkError(f"cannot connect to a verifier at {address}")
