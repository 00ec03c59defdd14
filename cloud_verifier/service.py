"""The servicer: protobuf in, jobs to the engine, replies out. Thin; decisions live in the engine.

Replies come from the engine's thread and cross into the event loop through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from cloud_verifier.engine import Engine
from cloud_verifier.session import DEFAULT_TENANT
from cloud_verifier.tracing import RoundTracer
from cloud_verifier.work import Job, Reply
from common import codec
from common.errors import InvalidFieldError
from common.pb import outrider_pb2 as pb
from common.pb import outrider_pb2_grpc
from common.types import (
    CancelRequest,
    Draining,
    GeneratedTokens,
    GenerateRequest,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    VerifyRequest,
)

SESSION_ID_KEY = "x-session-id"
TENANT_KEY = "x-outrider-tenant"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SupersededError(Exception):
    """A newer stream carries this session now."""


class VerifierService(outrider_pb2_grpc.VerifierServicer):  # type: ignore[misc]
    def __init__(self, engine: Engine, tracer: RoundTracer | None = None) -> None:
        self._engine = engine
        self._tracer = tracer
        self._streams: dict[tuple[str, bytes], _Stream] = {}

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def announce_draining(self, grace_s: float, reason: str) -> None:
        for stream in self._streams.values():
            stream.push(Draining(int(grace_s * 1000), reason), None)

    # ----------------------------------------------------------------------------------- streams

    async def Session(self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any) -> None:
        stream = _Stream(self, _tenant_of(context), _session_id_of(context))
        reader = asyncio.create_task(stream.read_all(request_iterator))
        try:
            while (message := await stream.outgoing.get()) is not None:
                await context.write(message)
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            stream.detach()

    def bind(self, key: tuple[str, bytes], stream: _Stream) -> None:
        """`stream` carries the session of this tenant and id from now on; an older stream of it ends."""
        older = self._streams.get(key)
        if older is not None and older is not stream:
            older.end(SupersededError("a newer stream carries this session"))
        self._streams[key] = stream

    def unbind(self, key: tuple[str, bytes], stream: _Stream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]

    def submit(self, tenant: str, session_id: bytes, request: SessionRequest, reply: Reply) -> None:
        if self._tracer is not None:
            reply = self._tracer.follow(tenant, session_id, request, reply)
        self._engine.submit(Job(session_id, request, reply, time.perf_counter_ns(), tenant))

    def count(self, session_id: bytes, response: SessionResponse) -> None:
        """Errors are counted here, where they leave: one thread, whoever made them."""
        if isinstance(response, RoundError):
            self._engine.observer.on_error(response.code, session_id, response.round_id, response.field)

    # ------------------------------------------------------------------------------------- unary

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return codec.encode_model_info(self._engine.model)

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        reply = await self._answer(codec.decode_open, request, context)
        assert isinstance(reply, codec.OpenReply)
        return codec.encode_open_response(reply)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        reply = await self._answer(codec.decode_verify, request, context)
        assert isinstance(reply, codec.VerifyReply)
        return codec.encode_verify_response(reply)

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        reply = await self._answer(codec.decode_close, request, context)
        assert not isinstance(reply, RoundError), reply
        return codec.encode_closed(reply)  # type: ignore[arg-type]

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        replies: asyncio.Queue[SessionResponse] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            decoded = codec.decode_generate(request)
        except InvalidFieldError as error:
            yield codec.encode_generate_response(self._refuse(request, error))
            return
        tenant = _tenant_of(context)
        session_id = _same_session_id(decoded.session_id, _session_id_of(context))
        is_done = False
        self.submit(tenant, session_id, decoded, lambda r: loop.call_soon_threadsafe(replies.put_nowait, r))
        try:
            while not is_done:
                reply = await replies.get()
                self.count(session_id, reply)
                assert isinstance(reply, codec.GenerateReply)
                is_done = isinstance(reply, RoundError) or (
                    isinstance(reply, GeneratedTokens) and reply.is_last
                )
                yield codec.encode_generate_response(reply)
        finally:
            if not is_done:
                self.submit(tenant, session_id, CancelRequest(decoded.round_id), _ignore)

    async def _answer(self, decode: Callable[[Any], Any], message: Any, context: Any) -> SessionResponse:
        """The final reply to one unary message; `Progress` has nowhere to go and is dropped."""
        try:
            request = decode(message)
        except InvalidFieldError as error:
            return self._refuse(message, error)
        session_id = _same_session_id(request.session_id, _session_id_of(context))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SessionResponse] = loop.create_future()

        def resolve(reply: SessionResponse) -> None:
            if not isinstance(reply, Progress):
                loop.call_soon_threadsafe(_set_once, answer, reply)

        self.submit(_tenant_of(context), session_id, request, resolve)
        response = await answer
        self.count(session_id, response)
        return response

    def _refuse(self, message: Any, error: InvalidFieldError) -> RoundError:
        response = _invalid(getattr(message, "round_id", 0), error)
        self.count(message.session_id, response)
        return response


class _Stream:
    """One `Session` call: its outgoing queue (None ends it) and the session it carries."""

    def __init__(self, service: VerifierService, tenant: str, session_id: bytes) -> None:
        self.outgoing: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.error: Exception | None = None
        self._service = service
        self._tenant = tenant
        self._session_id = session_id
        self._loop = asyncio.get_running_loop()
        self._generating: int | None = None
        self._num_owed = 0
        self._is_half_closed = False
        if session_id:
            service.bind((tenant, session_id), self)

    async def read_all(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for message in requests:
                self._take(message)
            self._is_half_closed = True
            self._end_if_done()
        except Exception as error:
            self.end(error)

    def _take(self, message: pb.SessionRequest) -> None:
        try:
            request = codec.decode_request(message)
        except InvalidFieldError as error:
            self._refuse(message, error)
            return
        if isinstance(request, OpenRequest) and not self._session_id:
            self._session_id = request.session_id
            self._service.bind((self._tenant, self._session_id), self)
        if isinstance(request, OpenRequest) and request.session_id != self._session_id:
            differs = InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")
            self._refuse(message, differs)
            return
        if not self._session_id:
            raise InvalidFieldError(SESSION_ID_KEY, "the stream names no session and begins without an open")
        if isinstance(request, GenerateRequest):
            self._generating = request.round_id
        kind = type(request)
        self._num_owed += not isinstance(request, CancelRequest)
        self._service.submit(
            self._tenant,
            self._session_id,
            request,
            lambda r: self._loop.call_soon_threadsafe(self.push, r, kind),
        )

    def push(self, response: SessionResponse, kind: type[SessionRequest] | None) -> None:
        self._service.count(self._session_id, response)
        self.outgoing.put_nowait(codec.encode_response(response, kind))
        if isinstance(response, Progress | Draining):
            return
        if isinstance(response, GeneratedTokens) and not response.is_last:
            return
        if kind is GenerateRequest:
            self._generating = None
        self._num_owed -= 1
        self._end_if_done()

    def _end_if_done(self) -> None:
        """After the edge's half-close the stream ends once every answer owed was sent."""
        if self._is_half_closed and self._num_owed <= 0:
            self.outgoing.put_nowait(None)

    def _refuse(self, message: pb.SessionRequest, error: InvalidFieldError) -> None:
        body = message.WhichOneof("body")
        kind = {"open": OpenRequest, "generate": GenerateRequest}.get(body or "", VerifyRequest)
        round_id = getattr(getattr(message, body), "round_id", 0) if body else 0
        self._num_owed += 1
        self.push(_invalid(round_id, error), kind)

    def end(self, error: Exception) -> None:
        self.error = error
        self.outgoing.put_nowait(None)

    def detach(self) -> None:
        """The call is over: nobody reads a running `Generate` any more. The session stays."""
        if self._generating is not None:
            self._service.submit(self._tenant, self._session_id, CancelRequest(self._generating), _ignore)
        self._service.unbind((self._tenant, self._session_id), self)


def _session_id_of(context: Any) -> bytes:
    """From the metadata; empty when it carries none. Raises `InvalidFieldError` when malformed."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_ID_KEY:
            try:
                session_id = bytes.fromhex(value)
            except ValueError:
                session_id = b""
            if len(session_id) != 16:
                raise InvalidFieldError(SESSION_ID_KEY, "must be 32 hex digits")
            return session_id
    return b""


def _tenant_of(context: Any) -> str:
    """From the metadata. Raises `InvalidFieldError` when malformed."""
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            if _TENANT.fullmatch(value) is None:
                raise InvalidFieldError(TENANT_KEY, "must be 1 to 64 letters, digits, '.', '_' or '-'")
            return str(value)
    return DEFAULT_TENANT


def _same_session_id(in_message: bytes, in_header: bytes) -> bytes:
    if in_message and in_header and in_message != in_header:
        raise InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")
    session_id = in_message or in_header
    if not session_id:
        raise InvalidFieldError("session_id", "is missing")
    return session_id


def _invalid(round_id: int, error: InvalidFieldError) -> RoundError:
    return RoundError(round_id, RoundErrorCode.INVALID, error.reason, field=error.field)


def _set_once(future: asyncio.Future[SessionResponse], reply: SessionResponse) -> None:
    if not future.done():
        future.set_result(reply)


def _ignore(reply: SessionResponse) -> None:
    """Nobody waits for this one."""
