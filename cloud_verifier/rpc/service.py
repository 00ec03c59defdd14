"""The servicer: protobuf in, jobs to the engine, replies out. It is thin; decisions are the engine's.

Replies reach the event loop through a `Mailbox`, from whatever thread the engine's step ran on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import grpc

from outrider.cloud_verifier.config import CallLimits
from outrider.cloud_verifier.engine.delivery import Delivery
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Disconnect, Job, Reply
from outrider.cloud_verifier.rpc.answers import Answers, UnreadError
from outrider.cloud_verifier.rpc.mailbox import Mailbox
from outrider.cloud_verifier.rpc.occupancy import Occupancy, OpenCall, num_ids_of
from outrider.cloud_verifier.rpc.one_message import SILENT_S, read_message
from outrider.cloud_verifier.rpc.stream import (
    REJECTION_S,
    IdleError,
    SessionStream,
    StreamContext,
    StreamRegistry,
    ignore,
    invalid,
    waiting_refusal,
)
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
    Limits,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
)

SERVICE_NAME = "outrider.v1.Verifier"
_REJECTED = (RoundErrorCode.INVALID, RoundErrorCode.UNKNOWN_SESSION)
CutOff = Callable[[Exception], None]
"""Ends one call with this error."""


class ShuttingDownError(Exception):
    """The grace of a shutdown is over."""


@dataclass(slots=True, eq=False)
class _Generation:
    """Is a `Generate` call. Its client says nothing more: one that is answered and not read ends as soon as a stream
    that said nothing does."""

    call: OpenCall
    cut_off: CutOff
    end: Callable[[], None]  # after its answers
    last_used_s: float = 0.0  # where it is idle: when it had its last answer, or sent one
    is_silent: bool = True

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is computed for it."""
        return self.call.num_requests <= 0


class VerifierService(outrider_pb2_grpc.VerifierServicer):  # type: ignore[misc]
    """Serves the calls of `outrider.v1.Verifier`. Lives on one event loop."""

    def __init__(
        self,
        engine: Engine,
        tracer: RoundTracer | None = None,
        caller_of: Callable[[Any], Caller] = claimed_caller,
        *,
        max_unread_bytes: int = 1 << 18,
        call_limits: CallLimits | None = None,
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._caller_of = caller_of
        self._max_unread_bytes = max_unread_bytes
        self._streams = StreamRegistry()
        self._callers: dict[CutOff, Caller] = {}  # of all calls that stream answers
        self._open: set[SessionStream] = set()
        self._generations: set[_Generation] = set()
        self.occupancy = Occupancy(call_limits or CallLimits())
        self.delivery = Delivery()
        self._num_unary = 0
        self._is_ending = False

    def make_handler(self) -> grpc.GenericRpcHandler:
        """Returns the handler of all calls. All are counted from their beginning, before their first message, and read
        bytes, which may be no message. Streams write bytes too: their size is needed, and a refusal is encoded once."""
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self.Session),
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._reading(self.Generate, pb.GenerateRequest)
            ),
        }
        for kind in (pb.DescribeRequest, pb.OpenRequest, pb.VerifyRequest, pb.CloseRequest):
            name = kind.__name__.removesuffix("Request")
            handlers[name] = grpc.stream_unary_rpc_method_handler(
                self._reading(getattr(self, name), kind), response_serializer=_serialize
            )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    def _reading(
        self, behaviour: Callable[[Any, Any, OpenCall], Awaitable[Any]], kind: type[Any]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Returns the handler of a call that brings one message of `kind`."""

        async def read(_requests: Any, context: Any) -> Any:
            with self.occupancy.call(self._caller_of(context).tenant) as call:
                content = await read_message(context, SILENT_S)
                return await behaviour(codec.parse(kind, content), context, call)

        return read

    @cached_property
    def _stream_context(self) -> StreamContext:
        """Made on the event loop that serves."""
        engine = self._engine
        return StreamContext(
            backlog=engine.backlog,
            submit=engine.submit if self._tracer is None else self._submit,
            mailbox=Mailbox(asyncio.get_running_loop()),
            observer=engine.observer,
            clock=engine.clock,
            idle_clock=engine.idle_clock,
            max_unread_bytes=self._max_unread_bytes,
            limits=engine.model.limits,
            delivery=self.delivery,
            registry=self._streams,
        )

    @property
    def num_streams(self) -> int:
        """Returns how many `Session` calls are open and have named their session."""
        return len(self._streams)

    @property
    def num_calls(self) -> int:
        """Returns how many calls of sessions have not ended."""
        return len(self._streams) + self._num_unary

    def announce_draining(self, grace_s: float, reason: str) -> None:
        """Sends `Draining` on all streams."""
        for stream in self._streams:
            stream.push(Draining(int(grace_s * 1000), reason), None)

    def end_idle_streams(self) -> None:
        """Ends streams that were idle for longer than a session may be, and sooner those that said nothing, and
        generations that are answered and not read."""
        now_s, ttl_s = self._engine.idle_clock.now(), self.occupancy.limits.idle_ttl_s
        calls: list[SessionStream | _Generation] = [*self._open, *self._generations]
        for call in [each for each in calls if each.is_idle]:
            idle_s = now_s - call.last_used_s
            if idle_s > ttl_s or (call.is_silent and idle_s > SILENT_S):
                call.cut_off(IdleError(f"the stream was idle for {idle_s:.0f} s"))

    def end_calls(self) -> None:
        """Takes nothing new. Generations end with what they have, streams with `ShuttingDownError` once their requests
        are answered."""
        self._is_ending = True
        for stream in self._streams:
            stream.finish(ShuttingDownError("the verifier is shutting down"))
        for generation in self._generations:
            generation.end()

    def end_streams_of(self, token_ids: Collection[str], error: Exception) -> None:
        """Cuts off the streams that came with one of these tokens. Their sessions stay."""
        for cut_off in [each for each, caller in self._callers.items() if caller.token_id in token_ids]:
            cut_off(error)

    def _submit(self, job: Job) -> None:
        if self._tracer is not None:
            job.reply = self._tracer.follow(job.tenant, job.session_id, job.request, job.reply)
        self._engine.submit(job)

    def _submit_unary(
        self, call: OpenCall, session_id: bytes, request: SessionRequest, reply: Reply = ignore
    ) -> None:
        arrival_ns = int(self._engine.clock.now() * 1e9)
        self._submit(Job(session_id, request, reply, arrival_ns, call.tenant, call=call))

    def _disconnect(self, call: OpenCall, session_id: bytes) -> None:
        """Tells the engine that a call is over whose request it has not answered."""
        arrival_ns, post = int(self._engine.clock.now() * 1e9), self._stream_context.mailbox.post
        call.take()
        job = Job(session_id, Disconnect(), ignore, arrival_ns, call.tenant, call=call)
        job.on_taken = lambda: post(call.give_back)
        self._submit(job)

    def _count(self, session_id: bytes, response: SessionResponse) -> None:
        """Counts an error where it leaves: on one thread, wherever it was made."""
        if isinstance(response, RoundError):
            self._engine.observer.on_error(response.code, session_id, response.round_id, response.field)

    def _check_taking(self) -> None:
        if self._is_ending:
            raise ShuttingDownError("the verifier is shutting down")

    # --------------------------------------------------------------------------------- the stream

    async def Session(self, request_iterator: AsyncIterator[bytes], context: Any) -> None:
        """Carries a session's requests and answers, in both directions, until either side ends the call."""
        self._check_taking()
        caller = self._caller_of(context)
        with self.occupancy.call(caller.tenant) as call:
            stream = SessionStream(self._stream_context, caller.tenant, session_id_of(context), call)
            self._open.add(stream)
            stream.read(request_iterator)
            try:
                with self._may_be_cut_off(stream.cut_off, caller):
                    await stream.answers.write_to(context)
            finally:
                stream.detach()
                self._open.remove(stream)

    # ------------------------------------------------------------------------------------- unary

    async def Describe(
        self, request: pb.DescribeRequest, context: Any, call: OpenCall
    ) -> pb.DescribeResponse:
        """Returns what is served: model, limits, methods."""
        # For `edge-client doctor`: certificates and tokens expire by clocks that should agree.
        context.set_trailing_metadata((("x-outrider-time-ms", str(time.time_ns() // 1_000_000)),))
        return codec.encode_model_info(replace(self._engine.model, memory=self._engine.reported_memory))

    async def Open(self, request: pb.OpenRequest, context: Any, call: OpenCall) -> pb.OpenResponse:
        """Opens a session or replaces its sequence."""
        reply = await self._answer(codec.decode_open, request, context, call)
        assert isinstance(reply, codec.OpenReply)
        return codec.encode_open_response(reply)

    async def Verify(self, request: pb.VerifyRequest, context: Any, call: OpenCall) -> pb.VerifyResponse:
        """Verifies one round."""
        reply = await self._answer(codec.decode_verify, request, context, call)
        assert isinstance(reply, codec.VerifyReply)
        return codec.encode_verify_response(reply)

    async def Close(self, request: pb.CloseRequest, context: Any, call: OpenCall) -> pb.CloseResponse:
        """Closes a session."""
        reply = await self._answer(codec.decode_close, request, context, call)
        if (
            isinstance(reply, RoundError) and reply.code is RoundErrorCode.INVALID
        ):  # its answer has no place for one
            raise InvalidFieldError(reply.field, reply.message)
        assert not isinstance(reply, RoundError), reply
        return codec.encode_closed(reply)  # type: ignore[arg-type]

    async def Generate(self, request: pb.GenerateRequest, context: Any, call: OpenCall) -> None:
        """Streams tokens that the target decodes; the end of the call ends it."""
        try:
            decoded = codec.decode_generate(request, self._engine.model.limits)
        except InvalidFieldError as error:
            await asyncio.sleep(REJECTION_S)
            reply = codec.encode_generate_response(self._answer_invalid(request, error))
            await context.write(reply.SerializeToString())
            return
        caller = self._caller_of(context)
        session_id = same_session_id(decoded.session_id, session_id_of(context))
        answers = Answers(self._max_unread_bytes, self.delivery)
        is_over = is_rejected = False

        def push(reply: SessionResponse) -> None:
            nonlocal is_over, is_rejected
            is_last = isinstance(reply, RoundError) or (isinstance(reply, GeneratedTokens) and reply.is_last)
            if is_last:
                call.give_back(num_ids_of(decoded))
            if is_over or answers.error is not None:
                return
            self._count(session_id, reply)
            assert isinstance(reply, codec.GenerateReply)
            try:
                answers.put(codec.encode_generate_response(reply).SerializeToString())
            except UnreadError as error:
                answers.cut_off(error)
                return
            if is_last:
                is_over = True
                is_rejected = isinstance(reply, RoundError) and reply.code in _REJECTED
                answers.end()
                touch()

        def end() -> None:
            self._submit_unary(call, session_id, CancelRequest(decoded.round_id))

        generation = _Generation(call, answers.cut_off, end)

        def touch() -> None:
            if generation.is_idle:
                generation.last_used_s = self._engine.idle_clock.now()

        post = self._stream_context.mailbox.post
        with self._taking(call, session_id, decoded) as refusal:
            if refusal is not None:
                await context.write(codec.encode_generate_response(refusal).SerializeToString())
                return
            self._submit_unary(call, session_id, decoded, lambda reply: post(push, reply))
            self._generations.add(generation)
            try:
                with self._may_be_cut_off(answers.cut_off, caller):
                    await answers.write_to(context, touch)
                if is_rejected:
                    await asyncio.sleep(REJECTION_S)
            finally:
                self._generations.remove(generation)
                if not is_over:
                    is_over = True
                    self._disconnect(call, session_id)

    async def _answer(
        self, decode: Callable[[Any, Limits], Any], message: Any, context: Any, call: OpenCall
    ) -> SessionResponse:
        """Returns the final reply to one unary message; `Progress` is dropped."""
        try:
            request = decode(message, self._engine.model.limits)
        except InvalidFieldError as error:
            await asyncio.sleep(REJECTION_S)
            return self._answer_invalid(message, error)
        session_id = same_session_id(request.session_id, session_id_of(context))
        answer: asyncio.Future[SessionResponse] = asyncio.get_running_loop().create_future()
        post = self._stream_context.mailbox.post

        def settle(reply: SessionResponse) -> None:
            call.give_back(num_ids_of(request))
            if not answer.done():
                answer.set_result(reply)

        def resolve(reply: SessionResponse) -> None:
            if not isinstance(reply, Progress):
                post(settle, reply)

        with self._taking(call, session_id, request) as refusal:
            if refusal is None:
                self._submit_unary(call, session_id, request, resolve)
            try:
                response = refusal or await answer
            except asyncio.CancelledError:
                self._disconnect(call, session_id)
                raise
            if isinstance(response, RoundError) and response.code in _REJECTED:
                await asyncio.sleep(REJECTION_S)
        self._count(session_id, response)
        return response

    @contextlib.contextmanager
    def _may_be_cut_off(self, cut_off: CutOff, caller: Caller) -> Iterator[None]:
        """Lets the call be ended with its token, inside."""
        self._callers[cut_off] = caller
        try:
            yield
        finally:
            del self._callers[cut_off]

    @contextlib.contextmanager
    def _taking(
        self, call: OpenCall, session_id: bytes, request: SessionRequest
    ) -> Iterator[RoundError | None]:
        """Counts the request of a unary call, which its last answer gives back; yields the refusal of one that there is
        no room for."""
        self._check_taking()
        if limit := call.take(num_ids_of(request)):
            yield waiting_refusal(self._stream_context, (call.tenant, session_id), request, limit)
            return
        self._num_unary += 1
        try:
            yield None
        finally:
            self._num_unary -= 1

    def _answer_invalid(self, message: Any, error: InvalidFieldError) -> RoundError:
        response = invalid(getattr(message, "round_id", 0), error)
        self._count(message.session_id, response)
        return response


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
