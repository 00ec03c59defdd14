"""The requests in flight: sent in order, sent again on a fresh connection, answered oldest first.

Several rounds may be in flight at once; an opening is always alone. The verifier takes a session's requests
in the order of their arrival, and a request sent twice is answered twice and applied once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.common.clock import Clock
from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import (
    GeneratedTokens,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.transport.connection import ConnectionManager
from outrider.edge_client.transport.link.base import Connection

_MAX_ATTEMPT_S = 10.0
_MAX_TIMED_OUT = 32  # the number of replies that a verifier keeps of a session

Job = OpenRequest | VerifyRequest
FinalReply = Opened | Verdict | RoundError
AnswerCheck = Callable[[SessionRequest, SessionResponse], None]
"""Raises `CallRejectedError` where a reply cannot answer a request."""


@dataclass(slots=True, eq=False)
class Outstanding:
    """A request in flight. Its answer is late `deadline_s` after the submission, or after the answer before
    its own: until then the verifier was busy with this session. Its draft took `drafted_s` before that."""

    job: Job
    submitted_s: float
    deadline_s: float
    drafted_s: float = 0.0
    sent_on: Connection | None = None
    sent_s: float = 0.0  # the last time
    reply: FinalReply | None = None
    arrived_s: float = 0.0
    progress_s: float | None = None  # when the verifier last reported that it computes
    is_ordinary: bool = True  # neither sent twice nor computed for long
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def wait_s(self) -> float:
        """Returns the seconds from the submission to the answer."""
        return self.arrived_s - self.submitted_s

    @property
    def round_s(self) -> float:
        """Returns the seconds from the beginning of the draft to the answer."""
        return self.drafted_s + self.wait_s

    @property
    def trip_s(self) -> float:
        """Returns the seconds from the last sending to the answer; never more than the wait."""
        return self.arrived_s - self.sent_s

    def is_answered_by(self, reply: SessionResponse) -> bool:
        """Returns whether `reply` is the final reply to this request, or what came in its place."""
        if isinstance(reply, Opened):
            return isinstance(self.job, OpenRequest)
        if not isinstance(reply, Verdict | RoundError | GeneratedTokens):
            return False
        return reply.round_id == self.job.round_id


class InFlight:
    """Sends requests and collects their answers. `is_patient` (the policy `wait`) sends them again on fresh
    connections until `recover_timeout_s`."""

    def __init__(
        self,
        connections: ConnectionManager,
        recover_timeout_s: float,
        is_patient: bool,
        clock: Clock,
        check: AnswerCheck,
    ) -> None:
        self._check = check
        self.outstanding: deque[Outstanding] = deque()  # oldest first
        self.newest_answered = 0  # the highest round id that an answer came to
        self._connections = connections
        self._recover_timeout_s = recover_timeout_s
        self._is_patient = is_patient
        self._now = clock.now
        self._last_answer_s = float("-inf")
        self._timed_out: OrderedDict[int, Outstanding] = OrderedDict()
        self._late: list[tuple[Outstanding, Verdict]] = []

    def submit(self, job: Job, deadline_s: float, drafted_s: float = 0.0) -> None:
        """Appends `job` to those in flight and sends it where there is a connection; never waits."""
        self.outstanding.append(Outstanding(job, self._now(), deadline_s, drafted_s))
        connection = self._connections.connection
        if connection is not None:
            try:
                self._send_on(connection)
            except LinkError:
                self._connections.drop()

    def clear(self) -> None:
        """Forgets the requests in flight: their answers will be ignored."""
        self.outstanding.clear()

    def retain(self, are_kept: Sequence[bool]) -> None:
        """Keeps those flagged of the requests in flight, oldest first, and forgets the others."""
        pairs = zip(self.outstanding, are_kept, strict=True)
        self.outstanding = deque(each for each, is_kept in pairs if is_kept)

    def resubmit(self, refused: Outstanding, next_round_id: Callable[[], int]) -> None:
        """Submits a refused round and those after it under new ids, so that answers to the old are ignored."""
        jobs = [(each.job, each.deadline_s) for each in (refused, *self.outstanding)]
        self.clear()
        for job, deadline_s in jobs:
            self.submit(replace(job, round_id=next_round_id()), deadline_s)

    # ------------------------------------------------------------------------------------- answers

    def first_answer(
        self, attempt_s: float, connect_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Outstanding:
        """Waits for the answer to the oldest request, and returns that request, which is in flight no more.

        After a silent `attempt_s` all are sent again on a fresh connection, for as long as the oldest one's
        deadline lasts (patient: `recover_timeout_s`). A lost connection has `connect_s` to come back. The
        first fresh connection is a trial of the link, and lasts a whole deadline.
        `meanwhile` runs once, after the sending. Raises `RoundTimeoutError`, or `LinkError` when patient.
        """
        connections, first = self._connections, self.outstanding[0]
        start_s = max(first.submitted_s, self._last_answer_s)
        give_up_s = start_s + (self._recover_timeout_s if self._is_patient else first.deadline_s)
        attempt_end_s, reconnect_by_s = start_s + attempt_s, start_s + connect_s
        is_trial_due = isinstance(first.job, VerifyRequest)
        while first.reply is None:
            connections.check_cancelled()
            try:
                connection = connections.wait(min(give_up_s, reconnect_by_s))
                if first.sent_on is not connection:
                    self._send_on(connection)
                    attempt_end_s = self._now() + attempt_s
                    if is_trial_due:
                        give_up_s, is_trial_due = max(give_up_s, self._now() + first.deadline_s), False
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                if first.progress_s is not None:
                    give_up_s = attempt_end_s = first.progress_s + self._recover_timeout_s
                if self._receive(min(attempt_end_s, give_up_s)):
                    continue
            except RoundTimeoutError:
                raise self._give_up(start_s) from None
            except LinkError:
                connections.drop()
                reconnect_by_s = self._now() + connect_s
                continue
            # Only with nothing left to read: an answer may have come while the edge was drafting.
            if self._now() >= give_up_s:
                raise self._give_up(start_s)
            if self._now() >= attempt_end_s:
                attempt_s = min(2 * attempt_s, _MAX_ATTEMPT_S)
                connections.drop()
        self._last_answer_s = first.arrived_s
        return self.outstanding.popleft()

    def poll(self, wait_s: float = 0.0) -> None:
        """Reads the messages that have arrived, and waits for the oldest request's answer for `wait_s` at most."""
        until_s = self._now() + wait_s
        try:
            while self._connections.connection is not None:
                is_answered = not self.outstanding or self.outstanding[0].reply is not None
                if not self._receive(self._now() if is_answered else until_s):
                    return
        except LinkError:
            self._connections.drop()

    def take_late_verdicts(self) -> list[tuple[Outstanding, Verdict]]:
        """Returns the verdicts of timed-out rounds that arrived since, oldest first, with their requests."""
        late, self._late = self._late, []
        return late

    def set_aside(self, reply: SessionResponse) -> None:
        """Keeps a late verdict for `take_late_verdicts`, and ignores any other message.

        `Draining` too: rounds of open sessions are still answered, and the stream's end makes us reconnect.
        """
        if isinstance(reply, Verdict) and (round_ := self._timed_out.pop(reply.round_id, None)):
            self._check(round_.job, reply)
            round_.arrived_s = self._connections.arrival_s
            self._late.append((round_, reply))

    # ------------------------------------------------------------------------------------ messages

    def _send_on(self, connection: Connection) -> None:
        """Sends, in order, all that was neither sent on this connection nor answered. Raises `LinkError`."""
        traffic = self._connections.traffic
        for each in self.outstanding:
            if each.sent_on is connection or each.reply is not None:
                continue
            before, sent_s = traffic.bytes_up, self._now()
            connection.send(each.job)
            each.bytes_up += traffic.bytes_up - before
            each.is_ordinary = each.is_ordinary and each.sent_on is None
            each.sent_on, each.sent_s = connection, sent_s

    def _receive(self, until_s: float) -> bool:
        """Reads one message; returns False when there was none. Raises `LinkError`."""
        traffic = self._connections.traffic
        before = traffic.bytes_down
        reply = self._connections.receive(until_s)
        if reply is None:
            return False
        if isinstance(reply, Verdict | RoundError):
            self.newest_answered = max(self.newest_answered, reply.round_id)
        for each in self.outstanding:
            if each.is_answered_by(reply):
                self._check(each.job, reply)
                assert isinstance(reply, FinalReply)
                each.reply, each.arrived_s = reply, self._connections.arrival_s
                each.bytes_down += traffic.bytes_down - before
                return True
            if isinstance(reply, Progress) and reply.round_id == each.job.round_id:
                each.is_ordinary, each.progress_s = False, self._now()
                return True
        self.set_aside(reply)
        return True

    def _give_up(self, start_s: float) -> LinkError:
        connections, after_s = self._connections, self._now() - start_s
        message = f"no answer from {connections.address} within {after_s:.1f} s{connections.trouble}"
        connections.mark_suspect()
        for each in self.outstanding:
            if isinstance(each.job, VerifyRequest):
                self._timed_out[each.job.round_id] = each
        while len(self._timed_out) > _MAX_TIMED_OUT:
            self._timed_out.popitem(last=False)
        self.clear()
        return LinkError(message) if self._is_patient else RoundTimeoutError(message)
