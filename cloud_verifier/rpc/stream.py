"""One `Session` call: messages in become jobs, replies become messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from outrider.cloud_verifier.engine.backlog import AdmissionTicket, Backlog, Refusal
from outrider.cloud_verifier.engine.job import Job, num_tokens_of_round
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.rpc.answers import Answers, UnreadError
from outrider.cloud_verifier.rpc.mailbox import Mailbox
from outrider.cloud_verifier.security.metadata import SESSION_ID_KEY
from outrider.common import codec
from outrider.common.clock import Clock
from outrider.common.errors import InvalidFieldError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import (
    CancelRequest,
    CloseRequest,
    Draining,
    GeneratedTokens,
    GenerateRequest,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

SessionKey = tuple[str, bytes]
"""A tenant and its id of a session."""


class SupersededError(Exception):
    """A newer stream carries this session now."""


class StreamRegistry:
    """Holds the streams whose session is known, one a session."""

    def __init__(self) -> None:
        self._streams: dict[SessionKey, SessionStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[SessionStream]:
        return iter(list(self._streams.values()))

    def bind(self, key: SessionKey, stream: SessionStream) -> None:
        """Makes `stream` the one that carries this session; an older one of it ends."""
        older = self._streams.get(key)
        if older is not None and older is not stream:
            older.end(SupersededError("a newer stream carries this session"))
        self._streams[key] = stream

    def unbind(self, key: SessionKey, stream: SessionStream) -> None:
        """Removes `stream`, unless a newer one has taken its place."""
        if self._streams.get(key) is stream:
            del self._streams[key]


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Holds what the streams of one verifier share: where their rounds are admitted, computed and counted."""

    backlog: Backlog
    submit: Callable[[Job], None]
    mailbox: Mailbox
    observer: EngineObserver
    clock: Clock
    max_unread_bytes: int
    registry: StreamRegistry = field(default_factory=StreamRegistry)


class SessionStream:
    """Reads one call's requests and queues its answers. Lives on the event loop. The session outlives it."""

    def __init__(self, context: StreamContext, tenant: str, session_id: bytes) -> None:
        """`session_id` is empty where the call's metadata has none: the opening names it then."""
        self.answers = Answers(context.max_unread_bytes)
        self._context = context
        self._tenant = tenant
        self._session_id = session_id
        self._reader: asyncio.Task[None] | None = None
        self._last_round_id: int | None = None  # the highest that the engine was given here
        self._generating: int | None = None
        self._num_unanswered = 0
        self._round_tokens: dict[int, int] = {}  # of the unanswered rounds, oldest first
        self._has_last_request = False  # the edge's half-close, or ours
        self._last_error: Exception | None = None  # how to end once everything is answered
        if session_id:
            context.registry.bind((tenant, session_id), self)

    def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Takes requests from now on."""
        self._reader = asyncio.create_task(self._read_all(requests))

    async def _read_all(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for message in requests:
                self._take(message)
            self._has_last_request = True
            self._end_if_done()
        except Exception as error:
            self.end(error)

    # ------------------------------------------------------------------------------------ messages in

    def _take(self, message: pb.SessionRequest) -> None:
        """Refuses a new round before it is decoded: under a flood nearly all of what arrives ends there."""
        ticket: AdmissionTicket | None = None
        if message.WhichOneof("body") == "verify" and self._is_new(message.verify.round_id):
            admitted = self._enter_round(message.verify)
            if isinstance(admitted, Refusal):
                self._answer_refused(message.verify.round_id, admitted)
                return
            ticket = admitted
        try:
            request = codec.decode_request(message)
            if isinstance(request, OpenRequest):
                self._check_session_id(request.session_id)
        except InvalidFieldError as error:
            if ticket is not None:
                self._context.backlog.withdraw(ticket)
            self._answer_invalid(message, error)
            return
        if not self._session_id:
            raise InvalidFieldError(SESSION_ID_KEY, "the stream names no session and begins without an open")
        self._submit(request, ticket)

    def _is_new(self, round_id: int) -> bool:
        """Returns whether the round is above all that this stream brought, and so cannot be a replay."""
        return self._last_round_id is not None and round_id > self._last_round_id

    def _enter_round(self, verify: pb.VerifyRequest) -> AdmissionTicket | Refusal:
        num_tokens = num_tokens_of_round(len(verify.committed_tokens), len(verify.draft_tokens))
        num_own_tokens = next(iter(self._round_tokens.values()), 0)
        return self._context.backlog.enter_round(
            self._tenant, num_tokens, verify.deadline_ms, num_own_tokens=num_own_tokens
        )

    def _check_session_id(self, session_id: bytes) -> None:
        if not self._session_id:
            self._session_id = session_id
            self._context.registry.bind((self._tenant, session_id), self)
        if session_id != self._session_id:
            raise InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")

    def _submit(self, request: SessionRequest, ticket: AdmissionTicket | None = None) -> None:
        arrival_ns = int(self._context.clock.now() * 1e9)
        reply: Callable[[SessionResponse], object] = ignore
        job = Job(self._session_id, request, reply, arrival_ns, self._tenant, ticket)
        if not isinstance(request, CancelRequest):
            post, kind = self._context.mailbox.post, type(request)
            job.reply = lambda response: post(self.push, response, kind)
            self._num_unanswered += 1
            if not isinstance(request, CloseRequest):
                self._last_round_id = max(self._last_round_id or 0, request.round_id)
            if isinstance(request, GenerateRequest):
                self._generating = request.round_id
            elif isinstance(request, VerifyRequest):
                self._round_tokens[request.round_id] = job.num_tokens
        self._context.submit(job)

    # ----------------------------------------------------------------------------------- messages out

    def push(self, response: SessionResponse, kind: type[SessionRequest] | None) -> None:
        """Queues a reply to a request of `kind`, or an announcement. A client that does not read is cut off."""
        if self.answers.error is not None:
            return
        if isinstance(response, RoundError):
            self._context.observer.on_error(
                response.code, self._session_id, response.round_id, response.field
            )
        if not self._put(codec.encode_response(response, kind).SerializeToString()):
            return
        if isinstance(response, Progress | Draining):
            return
        if isinstance(response, GeneratedTokens) and not response.is_last:
            return
        if kind is GenerateRequest and self._generating == getattr(response, "round_id", None):
            self._generating = None
        if isinstance(response, Verdict | RoundError):
            self._round_tokens.pop(response.round_id, None)
        self._num_unanswered -= 1
        self._end_if_done()

    def _answer_refused(self, round_id: int, refusal: Refusal) -> None:
        if self.answers.error is None:
            self._context.observer.on_error(RoundErrorCode.REFUSED, self._session_id, round_id)
            self._put(codec.encode_refusal(round_id, refusal.message, refusal.retry_after_ms))

    def _answer_invalid(self, message: pb.SessionRequest, error: InvalidFieldError) -> None:
        body = message.WhichOneof("body")
        kind = {"open": OpenRequest, "generate": GenerateRequest}.get(body or "", VerifyRequest)
        round_id = getattr(getattr(message, body), "round_id", 0) if body else 0
        self._num_unanswered += 1
        self.push(invalid(round_id, error), kind)

    def _put(self, message: bytes) -> bool:
        """Returns False for a client that does not read, which is cut off."""
        try:
            self.answers.put(message)
        except UnreadError as error:
            self.cut_off(error)
            return False
        return True

    # ---------------------------------------------------------------------------------------- its end

    def _end_if_done(self) -> None:
        if self._has_last_request and self._num_unanswered <= 0:
            self.answers.end(self._last_error)

    def finish(self, error: Exception) -> None:
        """Takes no more requests; the call ends with `error` after all answers."""
        self._stop()
        self._has_last_request, self._last_error = True, error
        self._end_if_done()

    def end(self, error: Exception) -> None:
        """Ends the call with `error` after the answers that are queued."""
        self.answers.end(error)

    def cut_off(self, error: Exception) -> None:
        """Ends the call at once."""
        self.answers.cut_off(error)
        self._stop()

    def detach(self) -> None:
        """Forgets the call, which is over: nobody reads a running `Generate` any more. The session stays."""
        self._stop()
        self._context.registry.unbind((self._tenant, self._session_id), self)

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._generating is not None:
            self._submit(CancelRequest(self._generating))


def invalid(round_id: int, error: InvalidFieldError) -> RoundError:
    """Returns the answer to a request with an invalid field."""
    return RoundError(round_id, RoundErrorCode.INVALID, error.reason, field=error.field)


def ignore(reply: SessionResponse) -> None:
    """Drops a reply that nobody waits for."""
