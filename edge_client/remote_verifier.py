"""One job at a time into one final answer: deadlines, refusals, lost connections, late replies.

What must change the text (a rebuild, a fallback token) is the session's business, told by exception.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from common.errors import IncompatibleError, LinkError, OutriderError, RoundFailedError, RoundTimeoutError
from common.types import (
    CancelRequest,
    Closed,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from edge_client.deadline import RoundDeadline
from edge_client.lifeline import Lifeline
from edge_client.link.base import Connection, VerifierLink

CLOSE_TIMEOUT_S = 0.3
OPEN_ATTEMPT_S = 5.0  # an opening that computes says so earlier, by `Progress`
_MIN_RETRY_S = 0.02
_MAX_ATTEMPT_S = 10.0
_MAX_TIMED_OUT = 32  # as many as the verifier keeps replies of

Job = OpenRequest | VerifyRequest


class SessionLostError(OutriderError):
    """The verifier does not know this session (or lost it to a bug of its own): open again."""

    def __init__(self, error: RoundError) -> None:
        super().__init__(error.message)
        self.error = error


class UnknownPrefixError(OutriderError):
    """The verifier's text is not ours; `error` says where it is."""

    def __init__(self, error: RoundError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Answer:
    """A final reply, how long it took, and whether the round was an ordinary one."""

    reply: Opened | Verdict | RoundError
    wait_s: float
    is_ordinary: bool


class RemoteVerifier:
    """`is_patient` (the policy `wait`) resends on fresh connections until `recover_timeout_s`."""

    def __init__(
        self,
        link: VerifierLink,
        deadline: RoundDeadline,
        *,
        recover_timeout_s: float = 60.0,
        is_patient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lifeline = Lifeline(link, clock)
        self.deadline = deadline
        self.num_refusals = 0
        self._recover_timeout_s = recover_timeout_s
        self._is_patient = is_patient
        self._clock = clock
        self._last_round_id = 0
        self._timed_out: OrderedDict[int, VerifyRequest] = OrderedDict()
        self._late: list[tuple[VerifyRequest, Verdict]] = []

    def next_round_id(self) -> int:
        self._last_round_id += 1
        return self._last_round_id

    def connect(self) -> None:
        """The first connection. Raises `LinkError`: at once, or when patient, after `recover_timeout_s`."""
        self.lifeline.connect(self._recover_timeout_s if self._is_patient else 0.0)

    def is_back(self) -> bool:
        """Whether a link that failed seems to work again."""
        is_alive, reply = self.lifeline.take_sign_of_life()
        if reply is not None:
            self._set_aside(reply)
        return is_alive

    # -------------------------------------------------------------------------------------- jobs

    def open(
        self,
        request: OpenRequest,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Opened:
        """Runs `meanwhile` once while the verifier computes the prompt.

        Has `timeout_s` until a first sign (default, and after `Progress`: `recover_timeout_s`); unless
        patient, a link that breaks meanwhile gets one deadline to return.
        Raises `IncompatibleError`, `RoundFailedError`, `SessionLostError`, `RoundTimeoutError`, `LinkError`.
        """
        give_up_s = self._clock() + self._recover_timeout_s
        while True:
            total_s = timeout_s or self._recover_timeout_s
            answer = self._exchange(request, min(OPEN_ATTEMPT_S, total_s), total_s, meanwhile)
            if isinstance(answer.reply, Opened):
                return answer.reply
            assert isinstance(answer.reply, RoundError), f"an opening answered by {answer.reply}"
            self._handle_error(answer.reply, give_up_s)
            request, meanwhile = replace(request, round_id=self.next_round_id()), None

    def verify(self, request: VerifyRequest) -> tuple[Verdict, Answer]:
        """Raises `RoundTimeoutError` after the deadline; patient: `LinkError` after `recover_timeout_s`.

        Also `SessionLostError`, `UnknownPrefixError`, `RoundFailedError`, `CallRejectedError`. The verifier
        is told the deadline, unless patient: then a late answer serves as well.
        """
        give_up_s = self._clock() + self._recover_timeout_s
        while True:
            deadline_s = self.deadline.seconds
            if not self._is_patient:  # a verifier too busy to answer in time says so at once
                request = replace(request, deadline_ms=math.ceil(deadline_s * 1e3))
            answer = self._exchange(request, deadline_s, deadline_s)
            if isinstance(answer.reply, Verdict):
                if answer.is_ordinary:
                    self.deadline.observe(answer.wait_s)
                return answer.reply, answer
            assert isinstance(answer.reply, RoundError), f"a round answered by {answer.reply}"
            self._handle_error(answer.reply, give_up_s)
            # A refused round was not applied; under a fresh id nobody can take it for an old one.
            request = replace(request, round_id=self.next_round_id())

    def generate(self, request: GenerateRequest, silence_s: float) -> Iterator[GeneratedTokens]:
        """The stream of one `Generate`; ends early after a refusal, once its hint was waited for.

        Raises `RoundTimeoutError` after `silence_s` without a message, `LinkError` when the connection
        breaks, and the errors of `verify`.
        """
        lifeline = self.lifeline
        lifeline.wait(self._clock() + self._recover_timeout_s)
        lifeline.send(request)
        silent_at_s = self._clock() + silence_s
        while True:
            lifeline.check_cancelled()
            reply = lifeline.receive(silent_at_s)
            if reply is None and self._clock() >= silent_at_s:
                raise RoundTimeoutError(f"no token from {lifeline.address} for {silence_s:.1f} s")
            if getattr(reply, "round_id", 0) != request.round_id:
                continue
            silent_at_s = self._clock() + silence_s
            match reply:
                case GeneratedTokens():
                    yield reply
                    if reply.is_last:
                        return
                case Progress():
                    silent_at_s = self._clock() + self._recover_timeout_s
                case RoundError():
                    self._handle_error(reply, self._clock() + self._recover_timeout_s)
                    return

    def take_late_verdicts(self) -> list[tuple[VerifyRequest, Verdict]]:
        """Verdicts of timed-out rounds that arrived since, oldest first, with what they answer."""
        late, self._late = self._late, []
        return late

    def close(self, is_cancelled: bool = False) -> None:
        """Closes the session there (briefly waited for), then the connection. Never raises."""
        connection = self.lifeline.detach()
        if connection is None:
            return
        try:
            if is_cancelled:
                connection.send(CancelRequest(self._last_round_id))
            connection.send(CloseRequest())
            self._wait_until_closed(connection)
        except OutriderError:
            pass  # the verifier forgets idle sessions by itself
        finally:
            connection.close()

    def _wait_until_closed(self, connection: Connection) -> None:
        end_s = self._clock() + CLOSE_TIMEOUT_S
        while (left_s := end_s - self._clock()) > 0:
            if isinstance(connection.receive(left_s), Closed):
                return

    # ----------------------------------------------------------------------------------- exchange

    def _exchange(
        self, job: Job, attempt_s: float, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Answer:
        """Sends until the final reply to `job` arrives: after a silent `attempt_s` again, on a fresh
        connection (the same round is safe to send twice), at most for `timeout_s`."""
        lifeline, start_s = self.lifeline, self._clock()
        give_up_s = start_s + (self._recover_timeout_s if self._is_patient else timeout_s)
        # A job that has long to compute has not long to connect.
        connect_s = self._recover_timeout_s if self._is_patient else self.deadline.seconds
        attempt_end_s, reconnect_by_s = give_up_s, start_s + connect_s
        sent_on: Connection | None = None
        is_ordinary = True
        while self._clock() < give_up_s:
            lifeline.check_cancelled()
            try:
                connection = lifeline.wait(min(give_up_s, reconnect_by_s))
                if connection is not sent_on:
                    connection.send(job)
                    is_ordinary = is_ordinary and sent_on is None
                    sent_on, attempt_end_s = connection, self._clock() + attempt_s
                    if meanwhile is not None:
                        meanwhile()
                        meanwhile = None
                reply = lifeline.receive(min(attempt_end_s, give_up_s))
            except RoundTimeoutError:
                break
            except LinkError:
                lifeline.drop()
                reconnect_by_s = self._clock() + connect_s
                continue
            if isinstance(reply, Progress) and reply.round_id == job.round_id:
                is_ordinary = False
                give_up_s = attempt_end_s = self._clock() + self._recover_timeout_s
            elif _is_answer(reply, job):
                return Answer(reply, self._clock() - start_s, is_ordinary)
            elif reply is not None:
                self._set_aside(reply)
            elif attempt_end_s <= self._clock() < give_up_s:
                attempt_s = min(2 * attempt_s, _MAX_ATTEMPT_S)
                lifeline.drop()
        raise self._give_up(job, self._clock() - start_s)

    def _give_up(self, job: Job, after_s: float) -> LinkError:
        text = f"no answer from {self.lifeline.address} within {after_s:.1f} s{self.lifeline.trouble}"
        self.lifeline.suspect()
        if isinstance(job, VerifyRequest):
            self._timed_out[job.round_id] = job
            while len(self._timed_out) > _MAX_TIMED_OUT:
                self._timed_out.popitem(last=False)
        return LinkError(text) if self._is_patient else RoundTimeoutError(text)

    def _set_aside(self, reply: SessionResponse) -> None:
        """Not what we wait for: a late verdict is kept for the session, the rest is ignored.

        `Draining` too: rounds of open sessions are still answered, and the stream's end makes us reconnect.
        """
        if isinstance(reply, Verdict) and (request := self._timed_out.pop(reply.round_id, None)):
            self._late.append((request, reply))

    def _handle_error(self, error: RoundError, give_up_s: float) -> None:
        """Returns when the request should be sent again, as new; raises otherwise."""
        match error.code:
            case RoundErrorCode.REFUSED | RoundErrorCode.DRAINING:
                self.num_refusals += 1
                wait_s = max(_MIN_RETRY_S, error.retry_after_ms / 1000.0)
                if self._clock() + wait_s > give_up_s:
                    raise RoundFailedError(error)
                if error.code is RoundErrorCode.DRAINING:
                    self.lifeline.drop()
                self.lifeline.sleep(wait_s)
            case RoundErrorCode.UNKNOWN_SESSION | RoundErrorCode.INTERNAL:
                raise SessionLostError(error)
            case RoundErrorCode.UNKNOWN_PREFIX | RoundErrorCode.STALE:
                raise UnknownPrefixError(error)
            case RoundErrorCode.INVALID if error.field in ("tokenizer_fingerprint", "target_fingerprint"):
                raise IncompatibleError(f"{error.field}: {error.message}")
            case _:
                raise RoundFailedError(error)


def _is_answer(reply: SessionResponse | None, job: Job) -> TypeGuard[Opened | Verdict | RoundError]:
    if isinstance(reply, Opened):
        return isinstance(job, OpenRequest)
    return isinstance(reply, Verdict | RoundError) and reply.round_id == job.round_id
