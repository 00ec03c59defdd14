"""The servicer: protobuf in, jobs to the engine, replies out. Thin; decisions live in the engine.

Replies reach the event loop through a `Mailbox`, from whatever thread the engine's step ran on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any

import grpc

from outrider.cloud_verifier.engine.backlog import Refusal
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.work import Job, Reply
from outrider.cloud_verifier.rpc.answers import Answers
from outrider.cloud_verifier.rpc.outbox import Mailbox, UnreadError
from outrider.cloud_verifier.rpc.stream import SessionStream, SupersededError, ignore, invalid
from outrider.cloud_verifier.rpc.tracing import RoundTracer
from outrider.cloud_verifier.security.metadata import Caller, claimed_caller, same_session_id, session_id_of
from outrider.common import codec
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.common.types import (
    CancelRequest,
    Draining,
    GeneratedTokens,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    VerifyRequest,
)

SERVICE_NAME = "outrider.v1.Verifier"
CutOff = Callable[[Exception], None]  # ends one call with this error


class ShuttingDownError(Exception):
    """The grace of a shutdown is over."""


class VerifierService(outrider_pb2_grpc.VerifierServicer):  # type: ignore[misc]
    def __init__(
        self,
        engine: Engine,
        tracer: RoundTracer | None = None,
        caller_of: Callable[[Any], Caller] = claimed_caller,
        *,
        max_unread_bytes: int = 1 << 18,
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._caller_of = caller_of
        self._max_unread_bytes = max_unread_bytes
        self._streams: dict[tuple[str, bytes], SessionStream] = {}  # those whose session is known
        self._callers: dict[CutOff, Caller] = {}  # of all calls that stream answers
        self._mailbox: Mailbox | None = None
        self._num_unary = 0
        self._is_ending = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """What streams write is serialised already: its size is asked for, and a refusal is made once."""
        outrider_pb2_grpc.add_VerifierServicer_to_server(self, server)
        streams = {
            "Session": grpc.stream_stream_rpc_method_handler(self.Session, pb.SessionRequest.FromString),
            "Generate": grpc.unary_stream_rpc_method_handler(self.Generate, pb.GenerateRequest.FromString),
        }
        server.add_registered_method_handlers(SERVICE_NAME, streams)

    @property
    def mailbox(self) -> Mailbox:
        """Of the event loop that serves; asked for on that loop."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        return self._mailbox

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_calls(self) -> int:
        """Calls of sessions that have not ended."""
        return len(self._streams) + self._num_unary

    def announce_draining(self, grace_s: float, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.push(Draining(int(grace_s * 1000), reason), None)

    def end_calls(self) -> None:
        """Takes nothing new. Streams end with `ShuttingDownError` once what they owe is answered."""
        self._is_ending = True
        for stream in list(self._streams.values()):
            stream.finish(ShuttingDownError("the verifier is shutting down"))

    def end_streams_of(self, token_ids: Collection[str], error: Exception) -> None:
        """Cuts off the streams that came with one of these tokens. Their sessions stay."""
        for cut_off in [each for each, caller in self._callers.items() if caller.token_id in token_ids]:
            cut_off(error)

    # ----------------------------------------------------------------------------------- streams

    async def Session(self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any) -> None:
        self._check_taking()
        caller = self._caller_of(context)
        stream = SessionStream(self, caller.tenant, session_id_of(context), self._max_unread_bytes)
        stream.read(request_iterator)
        try:
            with self._may_be_cut_off(stream.cut_off, caller):
                await stream.answers.write_to(context)
        finally:
            stream.detach()

    def bind(self, key: tuple[str, bytes], stream: SessionStream) -> None:
        """`stream` carries the session of this tenant and id from now on; an older stream of it ends."""
        older = self._streams.get(key)
        if older is not None and older is not stream:
            older.end(SupersededError("a newer stream carries this session"))
        self._streams[key] = stream

    def unbind(self, key: tuple[str, bytes], stream: SessionStream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]

    def submit(
        self,
        tenant: str,
        session_id: bytes,
        request: SessionRequest,
        reply: Reply,
        *,
        has_entered: bool = False,
    ) -> None:
        """`has_entered`: `refuse` was asked, and let it in."""
        if self._tracer is not None:
            reply = self._tracer.follow(tenant, session_id, request, reply)
        self._engine.submit(Job(session_id, request, reply, time.perf_counter_ns(), tenant, has_entered))

    def refuse(self, tenant: str, request: VerifyRequest, num_own_tokens: int) -> Refusal | None:
        """Why a new round cannot be served in time, without asking the engine; else it is counted in."""
        return self._engine.enter_round(tenant, request, num_own_tokens=num_own_tokens)

    def would_refuse(
        self, tenant: str, num_tokens: int, deadline_ms: int, num_own_tokens: int
    ) -> Refusal | None:
        """`refuse` for a round that is not decoded yet; nothing is counted in."""
        return self._engine.backlog.would_refuse(
            tenant, num_tokens, deadline_ms, num_own_tokens=num_own_tokens
        )

    def count_refusal(self, session_id: bytes, round_id: int) -> None:
        self._engine.observer.on_error(RoundErrorCode.REFUSED, session_id, round_id)

    def count(self, session_id: bytes, response: SessionResponse) -> None:
        """Errors are counted here, where they leave: one thread, whoever made them."""
        if isinstance(response, RoundError):
            self._engine.observer.on_error(response.code, session_id, response.round_id, response.field)

    def _check_taking(self) -> None:
        if self._is_ending:
            raise ShuttingDownError("the verifier is shutting down")

    # ------------------------------------------------------------------------------------- unary

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        # For `edge-client doctor`: certificates and tokens expire by clocks that should agree.
        context.set_trailing_metadata((("x-outrider-time-ms", str(time.time_ns() // 1_000_000)),))
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

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        try:
            decoded = codec.decode_generate(request)
        except InvalidFieldError as error:
            reply = codec.encode_generate_response(self._answer_invalid(request, error))
            await context.write(reply.SerializeToString())
            return
        caller = self._caller_of(context)
        session_id = same_session_id(decoded.session_id, session_id_of(context))
        answers = Answers(self._max_unread_bytes)
        is_over = False

        def push(reply: SessionResponse) -> None:
            nonlocal is_over
            if is_over or answers.error is not None:
                return
            self.count(session_id, reply)
            assert isinstance(reply, codec.GenerateReply)
            try:
                answers.put(codec.encode_generate_response(reply).SerializeToString())
            except UnreadError as error:
                answers.cut_off(error)
                return
            if isinstance(reply, RoundError) or (isinstance(reply, GeneratedTokens) and reply.is_last):
                is_over = True
                answers.end()

        post = self.mailbox.post
        with self._unary_call():
            self.submit(caller.tenant, session_id, decoded, lambda reply: post(push, reply))
            try:
                with self._may_be_cut_off(answers.cut_off, caller):
                    await answers.write_to(context)
            finally:
                if not is_over:
                    is_over = True
                    self.submit(caller.tenant, session_id, CancelRequest(decoded.round_id), ignore)

    async def _answer(self, decode: Callable[[Any], Any], message: Any, context: Any) -> SessionResponse:
        """The final reply to one unary message; `Progress` has nowhere to go and is dropped."""
        try:
            request = decode(message)
        except InvalidFieldError as error:
            return self._answer_invalid(message, error)
        session_id = same_session_id(request.session_id, session_id_of(context))
        answer: asyncio.Future[SessionResponse] = asyncio.get_running_loop().create_future()
        post = self.mailbox.post

        def resolve(reply: SessionResponse) -> None:
            if not isinstance(reply, Progress):
                post(_set_once, answer, reply)

        with self._unary_call():
            self.submit(self._caller_of(context).tenant, session_id, request, resolve)
            response = await answer
        self.count(session_id, response)
        return response

    @contextlib.contextmanager
    def _may_be_cut_off(self, cut_off: CutOff, caller: Caller) -> Iterator[None]:
        """Meanwhile the call ends when its token does."""
        self._callers[cut_off] = caller
        try:
            yield
        finally:
            del self._callers[cut_off]

    @contextlib.contextmanager
    def _unary_call(self) -> Iterator[None]:
        self._check_taking()
        self._num_unary += 1
        try:
            yield
        finally:
            self._num_unary -= 1

    def _answer_invalid(self, message: Any, error: InvalidFieldError) -> RoundError:
        response = invalid(getattr(message, "round_id", 0), error)
        self.count(message.session_id, response)
        return response


def _set_once(future: asyncio.Future[SessionResponse], reply: SessionResponse) -> None:
    if not future.done():
        future.set_result(reply)
