"""Reads a request's body and writes its answer within bounds of size and time, or cuts the connection off."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.daemon.openai.errors import ApiError

log = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect what is meant to be seen at once
]
_FLUSH_POLL_S = 0.05


class ClientGone(Exception):
    """Raised where the client left or was cut off."""


def cut_off(transport: asyncio.Transport) -> None:
    """Ends a connection at once; unsent bytes in the kernel's buffer are dropped."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Wire:
    """Reads one request's body and writes its answer; a client that is too slow is cut off."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, serve: DaemonConfig
    ) -> None:
        self._scope, self._receive, self._asgi_send = scope, receive, send
        self._request_id = (b"x-request-id", request_id.encode())
        self._read_timeout_s, self._write_timeout_s = serve.read_timeout_s, serve.write_timeout_s
        self.is_complete = False  # the whole answer was handed to the transport
        self._is_started = self._is_stream = False
        client = scope.get("client")
        self.client = f"{client[0]}:{client[1]}" if client else ""

    async def read_json(self, max_bytes: int) -> Any:
        """Returns the body. Raises `ApiError` 413, 408 and 400, and `ClientGone`."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                body = await self._read_body(max_bytes)
        except TimeoutError as error:
            message = f"the body is not whole after {self._read_timeout_s:g} s"
            raise ApiError(408, message, code="body_too_slow") from error
        try:
            found = json.loads(body.decode("utf-8-sig"))  # of bytes, json would take what is no UTF-8 too
            if b"\\ud" in body or b"\\uD" in body:  # halves of characters can neither be read nor sent back
                json.dumps(found, ensure_ascii=False).encode()
            return found
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error

    async def _read_body(self, max_bytes: int) -> bytearray:
        too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
        length = Headers(scope=self._scope).get("content-length", "0")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            if not message.get("more_body", False):
                return body

    async def until_gone(self) -> None:
        """Returns when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, body: dict[str, object], warning: str = "") -> None:
        """Sends the answer as one JSON object, and `warning`, if any, as its header."""
        self._is_started = True
        headers = {"x-request-id": self._request_id[1].decode()}
        if warning:
            headers["x-outrider-warning"] = warning
        response = JSONResponse(body, headers=headers)
        await response(self._scope, self._receive, self._send)

    async def fail(self, error: ApiError) -> None:
        """Sends an error: as the answer's status, or as the last event of a stream that has begun. No
        `[DONE]` follows: it would say that the text is complete."""
        if self._is_stream:
            await self._send_data(_event(error.body()), is_last=True)
        elif not self._is_started:
            headers = {**error.headers, "x-request-id": self._request_id[1].decode()}
            if error.status in (408, 413):
                headers["connection"] = "close"  # the rest of the body is not read
            await JSONResponse(error.body(), error.status, headers)(self._scope, self._receive, self._send)

    async def start_stream(self, first: dict[str, object] | None, warning: str = "") -> None:
        """Sends the head of an event stream, with `warning`, if any, and its first chunk if there is one."""
        self._is_started = self._is_stream = True
        headers = [*_SSE_HEADERS, self._request_id]
        if warning:
            headers.append((b"x-outrider-warning", warning.encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if first is not None:
            await self.send_chunks([first])

    async def send_chunks(self, chunks: list[dict[str, object]]) -> None:
        """Sends chunks as events of the stream."""
        if chunks:
            await self._send_data(b"".join(map(_event, chunks)))

    async def end_stream(self) -> None:
        """Sends the closing event of a complete text."""
        await self._send_data(b"data: [DONE]\n\n", is_last=True)

    async def flush(self) -> None:
        """Waits until the kernel has the whole answer. Raises `ClientGone` for a client that does not read it
        in time."""
        transport = self._transport
        if transport is None:
            return
        end_s = time.monotonic() + self._write_timeout_s
        while transport.get_write_buffer_size() and not transport.is_closing():
            if time.monotonic() > end_s:
                self._cut_off()
            await asyncio.sleep(_FLUSH_POLL_S)

    async def _send_data(self, data: bytes, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._asgi_send(message)
        except TimeoutError:
            self._cut_off()
        except OSError as error:
            raise ClientGone from error

    def _cut_off(self) -> NoReturn:
        log.warning(
            "a client reads nothing: cut off",
            extra={"client": self.client, "seconds": self._write_timeout_s},
        )
        if self._transport is not None:
            cut_off(self._transport)
        raise ClientGone

    @property
    def _transport(self) -> asyncio.Transport | None:
        """Returns the transport that `server.Protocol` passes with the request; None under another ASGI
        server."""
        found: asyncio.Transport | None = self._scope.get("state", {}).get("transport")
        return found


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
