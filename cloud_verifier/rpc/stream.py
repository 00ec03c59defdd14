"""One `Session` call: messages in become jobs, replies become messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from outrider.cloud_verifier.engine.admission import MAX_WAITING
from outrider.cloud_verifier.engine.backlog import AdmissionTicket, Backlog, Refusal
from outrider.cloud_verifier.engine.delivery import Delivery
from outrider.cloud_verifier.engine.idle_time import IdleClock
from outrider.cloud_verifier.engine.job import Disconnect, Job, num_tokens_of_round
from outrider.cloud_verifier.engine.line import SessionKey
from outrider.cloud_verifier.engine.observe import EngineObserver
from outrider.cloud_verifier.rpc.answers import Answers, UnreadError
from outrider.cloud_verifier.rpc.mailbox import Mailbox
from outrider.cloud_verifier.rpc.occupancy import OpenCall, num_ids_of
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
    Limits,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

# For each answer to what is invalid: before it in a unary call, on a stream until the next message is read. Whoever
# sends it would send the next at once, and each message takes the event loop time that the rounds of others wait for.
# A refused round costs as much, or its hint where that is shorter, beyond those that a session may have in flight.
REJECTION_S = 0.1


class SupersededError(Exception):
    """A newer stream carries this session now."""


class IdleError(Exception):
    """A stream was idle for too long."""


class StreamRegistry:
    """Holds the streams whose session is known, one a session."""

    def __init__(self) -> None:
        self._streams: dict[SessionKey, SessionStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[SessionStream]:
        return iter(list(self._streams.values()))

    def bind(self, key: SessionKey, stream: SessionStream) -> None:
        """Makes `stream` the one that carries this session; an older one of it ends at once, and is read no more."""
        older = self._streams.get(key)
        if older is not None and older is not stream:
            older.cut_off(SupersededError("a newer stream carries this session"))
        self._streams[key] = stream

    def unbind(self, key: SessionKey, stream: SessionStream) -> bool:
        """Removes `stream`; returns False where a newer one has taken its place, which stays."""
        if self._streams.get(key) is not stream:
            return False
        del self._streams[key]
        return True


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Holds what the streams of one verifier share: where their rounds are admitted, computed and counted."""

    backlog: Backlog
    submit: Callable[[Job], None]
    mailbox: Mailbox
    observer: EngineObserver
    clock: Clock
    idle_clock: IdleClock
    max_unread_bytes: int
    limits: Limits
    delivery: Delivery = field(default_factory=Delivery)
    registry: StreamRegistry = field(default_factory=StreamRegistry)


class SessionStream:
    """Reads one call's requests and queues its answers. Lives on the event loop. The session outlives it."""

    def __init__(self, context: StreamContext, tenant: str, session_id: bytes, call: OpenCall) -> None:
        """`session_id` is empty where the call's metadata has none: the opening names it then."""
        self.answers = Answers(context.max_unread_bytes, context.delivery)
        self.last_used_s = context.idle_clock.now()
        self.is_silent = True  # it has said nothing yet
        self._context = context
        self._tenant = tenant
        self._session_id = session_id
        self._reader: asyncio.Task[None] | None = None
        self._last_round_id: int | None = None  # the highest that the engine was given here
        self._generating: int | None = None
        self._call = call
        self._pause_s = 0.0  # until the next message is read
        self._refused_until_s = 0.0  # the end of the times that refused rounds cost, one after another
        self._round_tokens: dict[int, int] = {}  # of the unanswered rounds, oldest first
        self._has_last_request = False  # the edge's half-close, or ours
        self._last_error: Exception | None = None  # how to end once everything is answered
        if session_id:
            context.registry.bind((tenant, session_id), self)

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is computed for it."""
        return self._call.num_requests <= 0

    def read(self, requests: AsyncIterator[bytes]) -> None:
        """Takes requests from now on."""
        self._reader = asyncio.create_task(self._read_all(requests))

    async def _read_all(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for content in requests:
                self._take(codec.parse(pb.SessionRequest, content))
                if self._call.is_full or self._pause_s:
                    await self._pause()
            self._has_last_request = True
            self._end_if_done()
        except Exception as error:
            self.end(error)

    async def _pause(self) -> None:
        """Waits until the engine has taken enough of what was read, and for a while after what was rejected."""
        await self._call.room()
        pause_s, self._pause_s = self._pause_s, 0.0
        await asyncio.sleep(pause_s)

    # ------------------------------------------------------------------------------------ messages in

    def _take(self, message: pb.SessionRequest) -> None:
        """Answers a request that is invalid, or over its tenant's bound. Refuses a round that has no room; the engine
        gets the others."""
        self.last_used_s, self.is_silent = self._context.idle_clock.now(), False
        try:
            request = codec.decode_request(message, self._context.limits)
            if isinstance(request, OpenRequest):
                self._check_session_id(request.session_id)
        except InvalidFieldError as error:
            self._answer_invalid(message, error)
            return
        if not self._session_id:
            raise InvalidFieldError(SESSION_ID_KEY, "the stream names no session and begins without an open")
        num_ids = num_ids_of(request)
        if limit := self._call.take(num_ids):
            self._pause_s += REJECTION_S
            session = self._tenant, self._session_id
            self._answer_error(waiting_refusal(self._context, session, request, limit), type(request))
            return
        ticket: AdmissionTicket | None = None
        if isinstance(request, VerifyRequest) and self._is_new(request.round_id):
            admitted = self._enter_round(request)
            if isinstance(admitted, Refusal):
                self._call.give_back(num_ids)
                self._answer_refused(request.round_id, admitted)
                return
            ticket = admitted
        self._submit(request, num_ids, ticket)

    def _is_new(self, round_id: int) -> bool:
        """Returns whether the round is above all that this stream brought, and so cannot be a replay."""
        return self._last_round_id is not None and round_id > self._last_round_id

    def _enter_round(self, verify: VerifyRequest) -> AdmissionTicket | Refusal:
        num_tokens = num_tokens_of_round(len(verify.committed_tokens), len(verify.draft_tokens))
        num_own_tokens = next(iter(self._round_tokens.values()), 0)
        return self._context.backlog.enter_round(
            self._tenant,
            num_tokens,
            verify.deadline_ms,
            num_own_tokens=num_own_tokens,
            session_id=self._session_id,
        )

    def _check_session_id(self, session_id: bytes) -> None:
        if not self._session_id:
            self._session_id = session_id
            self._context.registry.bind((self._tenant, session_id), self)
        if session_id != self._session_id:
            raise InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")

    def _submit(
        self,
        request: SessionRequest | Disconnect,
        num_ids: int = 0,
        ticket: AdmissionTicket | None = None,
    ) -> None:
        """Hands the engine a request, which was counted."""
        arrival_ns = int(self._context.clock.now() * 1e9)
        post = self._context.mailbox.post
        job = Job(self._session_id, request, ignore, arrival_ns, self._tenant, ticket, call=self)
        if isinstance(request, CancelRequest | Disconnect):
            job.on_taken = lambda: post(self._settle)
        else:
            kind = type(request)
            job.reply = lambda response: post(self.push, response, kind, num_ids)
            if not isinstance(request, CloseRequest):
                self._last_round_id = max(self._last_round_id or 0, request.round_id)
            if isinstance(request, GenerateRequest):
                self._generating = request.round_id
            elif isinstance(request, VerifyRequest):
                self._round_tokens[request.round_id] = job.num_tokens
        self._context.submit(job)

    # ----------------------------------------------------------------------------------- messages out

    def push(self, response: SessionResponse, kind: type[SessionRequest] | None, num_ids: int = 0) -> None:
        """Queues a reply to a request of `kind` with `num_ids`, or an announcement.

        A client that does not read is cut off.
        """
        is_final = not isinstance(response, Progress | Draining) and (
            not isinstance(response, GeneratedTokens) or response.is_last
        )
        if is_final:
            self._call.give_back(num_ids)
        if self.answers.error is not None:
            return
        self.last_used_s = self._context.idle_clock.now()
        if isinstance(response, RoundError):
            if response.code is RoundErrorCode.INVALID:
                self._pause_s += REJECTION_S
            self._context.observer.on_error(
                response.code, self._session_id, response.round_id, response.field
            )
        if not self._put(codec.encode_response(response, kind).SerializeToString()):
            return
        if not is_final:
            return
        if kind is GenerateRequest and self._generating == getattr(response, "round_id", None):
            self._generating = None
        if isinstance(response, Verdict | RoundError):
            self._round_tokens.pop(response.round_id, None)
        self._end_if_done()

    def _settle(self) -> None:
        """Notes that the engine took a request that has no answer."""
        self._call.give_back()
        self._end_if_done()

    def _answer_refused(self, round_id: int, refusal: Refusal) -> None:
        self._pace(min(refusal.retry_after_ms / 1000.0, REJECTION_S))
        if self.answers.error is None:
            self._context.observer.on_error(RoundErrorCode.REFUSED, self._session_id, round_id)
            self._put(codec.encode_refusal(round_id, refusal.message, refusal.retry_after_ms))

    def _pace(self, cost_s: float) -> None:
        """Stops reading for what a refused round costs, where more were refused in a short time than a session may have
        in flight: those of a client that pipelines are answered at once."""
        now_s = self._context.clock.now()
        self._refused_until_s = max(self._refused_until_s, now_s) + cost_s
        self._pause_s += max(0.0, self._refused_until_s - now_s - MAX_WAITING * cost_s)

    def _answer_invalid(self, message: pb.SessionRequest, error: InvalidFieldError) -> None:
        body = message.WhichOneof("body")
        kind = {"open": OpenRequest, "generate": GenerateRequest}.get(body or "", VerifyRequest)
        round_id = getattr(getattr(message, body), "round_id", 0) if body else 0
        self._answer_error(invalid(round_id, error), kind)

    def _answer_error(self, error: RoundError, kind: type[SessionRequest]) -> None:
        self._call.take()
        self.push(error, kind)

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
        if self._has_last_request and self.is_idle:
            self.answers.end(self._last_error)

    def finish(self, error: Exception) -> None:
        """Takes no more requests; the call ends with `error` after all answers."""
        self._stop_reading()
        if self._generating is not None:
            self._call.take()
            self._submit(CancelRequest(self._generating))
        self._has_last_request, self._last_error = True, error
        self._end_if_done()

    def end(self, error: Exception) -> None:
        """Ends the call with `error` after the answers that are queued."""
        self.answers.end(error)

    def cut_off(self, error: Exception) -> None:
        """Ends the call at once, which is then detached."""
        self.answers.cut_off(error)
        self._stop_reading()

    def detach(self) -> None:
        """Forgets the call, which is over. The session stays, without what only this call waited for."""
        self._stop_reading()
        if not self.is_idle:
            self._call.take()
            self._submit(Disconnect())
        if self._context.registry.unbind((self._tenant, self._session_id), self):
            self._context.backlog.leave_line(self._tenant, self._session_id)

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()


def invalid(round_id: int, error: InvalidFieldError) -> RoundError:
    """Returns the answer to a request with an invalid field."""
    return RoundError(round_id, RoundErrorCode.INVALID, error.reason, field=error.field)


def waiting_refusal(
    context: StreamContext, session: SessionKey, request: SessionRequest, limit: str
) -> RoundError:
    """Returns the answer to a request that would hold more than `limit` allows."""
    context.observer.on_refused("waiting")
    context.backlog.note_refused(*session)
    round_id, retry_ms = getattr(request, "round_id", 0), context.backlog.retry_ms()
    return RoundError(round_id, RoundErrorCode.REFUSED, limit, retry_after_ms=retry_ms)


def ignore(reply: SessionResponse) -> None:
    """Drops a reply that nobody waits for."""
