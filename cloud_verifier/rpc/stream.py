"""One `Session` call: messages in become jobs, replies become messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from outrider.cloud_verifier.engine.work import num_tokens_of, num_tokens_of_round
from outrider.cloud_verifier.rpc.answers import Answers
from outrider.cloud_verifier.rpc.outbox import UnreadError
from outrider.cloud_verifier.security.metadata import SESSION_ID_KEY
from outrider.common import codec
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

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.backlog import Refusal
    from outrider.cloud_verifier.rpc.service import VerifierService


class SupersededError(Exception):
    """A newer stream carries this session now."""


class SessionStream:
    """Lives on the event loop. The session outlives it."""

    def __init__(self, service: VerifierService, tenant: str, session_id: bytes, max_unread_bytes: int):
        self.answers = Answers(max_unread_bytes)
        self._service = service
        self._tenant = tenant
        self._session_id = session_id
        self._reader: asyncio.Task[None] | None = None
        self._last_round_id: int | None = None  # the highest that the engine was given here
        self._was_refused = False  # the last round
        self._generating: int | None = None
        self._num_owed = 0
        self._owed_tokens: dict[int, int] = {}  # of the rounds among them, oldest first
        self._has_last_request = False  # the edge's half-close, or ours
        self._last_error: Exception | None = None  # how to end once nothing is owed
        if session_id:
            service.bind((tenant, session_id), self)

    def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
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
        if self._was_refused and self._is_refused_again(message):
            return
        try:
            request = codec.decode_request(message)
        except InvalidFieldError as error:
            self._answer_invalid(message, error)
            return
        if isinstance(request, OpenRequest) and not self._session_id:
            self._session_id = request.session_id
            self._service.bind((self._tenant, self._session_id), self)
        if isinstance(request, OpenRequest) and request.session_id != self._session_id:
            differs = InvalidFieldError("session_id", f"differs from the {SESSION_ID_KEY} header")
            self._answer_invalid(message, differs)
            return
        if not self._session_id:
            raise InvalidFieldError(SESSION_ID_KEY, "the stream names no session and begins without an open")
        if isinstance(request, CancelRequest):
            self._service.submit(self._tenant, self._session_id, request, ignore)
            return
        has_entered = False
        kind = type(request)
        if isinstance(request, VerifyRequest) and self._is_new(request.round_id):
            refusal = self._service.refuse(self._tenant, request, self._num_own_tokens)
            self._was_refused = refusal is not None
            if refusal is not None:
                self._answer_refused(request.round_id, refusal)
                return
            has_entered = True
        self._num_owed += 1
        if isinstance(request, GenerateRequest):
            self._generating = request.round_id
        if isinstance(request, VerifyRequest):
            self._owed_tokens[request.round_id] = num_tokens_of(request)
        if not isinstance(request, CloseRequest):
            self._last_round_id = max(self._last_round_id or 0, request.round_id)
        post = self._service.mailbox.post
        self._service.submit(
            self._tenant,
            self._session_id,
            request,
            lambda r: post(self.push, r, kind),
            has_entered=has_entered,
        )

    def _is_new(self, round_id: int) -> bool:
        """A round above all that this stream brought cannot be a replay: it may be refused right here."""
        return self._last_round_id is not None and round_id > self._last_round_id

    @property
    def _num_own_tokens(self) -> int:
        """Of this stream's oldest round under way."""
        return next(iter(self._owed_tokens.values()), 0)

    def _is_refused_again(self, message: pb.SessionRequest) -> bool:
        """Where the last round was refused this one probably is, too: it is decoded if it is not.

        Under a flood nearly all of what arrives ends here, and what that costs is not there for the others.
        """
        if message.WhichOneof("body") != "verify":
            return False
        verify = message.verify
        if not self._is_new(verify.round_id):
            return False
        num_tokens = num_tokens_of_round(verify.committed_tokens, verify.draft_tokens)
        refusal = self._service.would_refuse(
            self._tenant, num_tokens, verify.deadline_ms, self._num_own_tokens
        )
        if refusal is None:
            return False
        self._answer_refused(verify.round_id, refusal)
        return True

    def _answer_refused(self, round_id: int, refusal: Refusal) -> None:
        if self.answers.error is not None:
            return
        self._service.count_refusal(self._session_id, round_id)
        self._put(codec.encode_refusal(round_id, refusal.message, refusal.retry_after_ms))

    def _answer_invalid(self, message: pb.SessionRequest, error: InvalidFieldError) -> None:
        body = message.WhichOneof("body")
        kind = {"open": OpenRequest, "generate": GenerateRequest}.get(body or "", VerifyRequest)
        round_id = getattr(getattr(message, body), "round_id", 0) if body else 0
        self._num_owed += 1
        self.push(invalid(round_id, error), kind)

    # ----------------------------------------------------------------------------------- messages out

    def push(self, response: SessionResponse, kind: type[SessionRequest] | None) -> None:
        """A reply to a request of `kind`, or an announcement. A client that does not read is cut off."""
        if self.answers.error is not None:
            return
        self._service.count(self._session_id, response)
        if not self._put(codec.encode_response(response, kind).SerializeToString()):
            return
        if isinstance(response, Progress | Draining):
            return
        if isinstance(response, GeneratedTokens) and not response.is_last:
            return
        if kind is GenerateRequest:
            self._generating = None
        if isinstance(response, Verdict | RoundError):
            self._owed_tokens.pop(response.round_id, None)
        self._num_owed -= 1
        self._end_if_done()

    def _put(self, message: bytes) -> bool:
        """False for a client that does not read, which is cut off."""
        try:
            self.answers.put(message)
        except UnreadError as error:
            self.cut_off(error)
            return False
        return True

    def _end_if_done(self) -> None:
        if self._has_last_request and self._num_owed <= 0:
            self.answers.end(self._last_error)

    def finish(self, error: Exception) -> None:
        """No more requests; what is owed is answered, then the call ends with `error`."""
        self._stop_reading()
        self._cancel_generation()
        self._has_last_request, self._last_error = True, error
        self._end_if_done()

    def end(self, error: Exception) -> None:
        """The call ends with `error` after what lies in the outbox."""
        self.answers.end(error)

    def cut_off(self, error: Exception) -> None:
        """The call ends at once."""
        self.answers.cut_off(error)
        self._stop_reading()
        self._cancel_generation()

    def detach(self) -> None:
        """The call is over: nobody reads a running `Generate` any more. The session stays."""
        self._stop_reading()
        self._cancel_generation()
        self._service.unbind((self._tenant, self._session_id), self)

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    def _cancel_generation(self) -> None:
        if self._generating is not None:
            self._service.submit(self._tenant, self._session_id, CancelRequest(self._generating), ignore)


def invalid(round_id: int, error: InvalidFieldError) -> RoundError:
    return RoundError(round_id, RoundErrorCode.INVALID, error.reason, field=error.field)


def ignore(reply: SessionResponse) -> None:
    """Nobody waits for this one."""
