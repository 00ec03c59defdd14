"""Jobs under way over the lifeline: sent in order, sent again on a fresh connection, answered oldest first.

Several rounds may be under way at once; an opening is always alone. The verifier takes a session's requests
in the order of their arrival, and a request sent twice is answered twice and applied once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import (
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.transport.connection import Lifeline
from outrider.edge_client.transport.link.base import Connection

_MAX_ATTEMPT_S = 10.0
_MAX_TIMED_OUT = 32  # as many as the verifier keeps replies of

Job = OpenRequest | VerifyRequest
FinalReply = Opened | Verdict | RoundError


@dataclass(slots=True, eq=False)
class Outstanding:
    """A job under way. Its answer counts as late `deadline_s` after it was given, or after the answer before
    its own: until then the verifier was busy with us. `drafted_s` went by before it was given."""

    job: Job
    given_s: float
    deadline_s: float
    drafted_s: float = 0.0
    sent_on: Connection | None = None
    sent_s: float = 0.0  # the last time
    reply: FinalReply | None = None
    arrived_s: float = 0.0
    progress_s: float | None = None  # when it last said that it computes
    is_ordinary: bool = True  # neither sent twice nor computed for long
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def wait_s(self) -> float:
        return self.arrived_s - self.given_s

    @property
    def round_s(self) -> float:
        return self.drafted_s + self.wait_s

    @property
    def trip_s(self) -> float:
        """Since it was last sent, on a connection of its own each time: never more than the wait."""
        return self.arrived_s - self.sent_s

    def answers(self, reply: SessionResponse) -> bool:
        if isinstance(reply, Opened):
            return isinstance(self.job, OpenRequest)
        return isinstance(reply, Verdict | RoundError) and reply.round_id == self.job.round_id


class Exchange:
    """`is_patient` (the policy `wait`) resends on fresh connections until `recover_timeout_s`."""

    def __init__(
        self, lifeline: Lifeline, recover_timeout_s: float, is_patient: bool, clock: Callable[[], float]
    ) -> None:
        self._lifeline = lifeline
        self._recover_timeout_s = recover_timeout_s
        self._is_patient = is_patient
        self._clock = clock
        self._outstanding: deque[Outstanding] = deque()
        self._last_answer_s = float("-inf")
        self.newest_answered = 0  # the highest round id that an answer came to
        self._timed_out: OrderedDict[int, Outstanding] = OrderedDict()
        self._late: list[tuple[Outstanding, Verdict]] = []

    @property
    def outstanding(self) -> deque[Outstanding]:
        """Oldest first."""
        return self._outstanding

    def give(self, job: Job, deadline_s: float, drafted_s: float = 0.0) -> None:
        """Puts `job` behind those under way and sends it if it can be sent now; never waits."""
        self._outstanding.append(Outstanding(job, self._clock(), deadline_s, drafted_s))
        connection = self._lifeline.connection
        if connection is not None:
            try:
                self._send_on(connection)
            except LinkError:
                self._lifeline.drop()

    def forget(self) -> None:
        """Nobody waits for the jobs under way any more."""
        self._outstanding.clear()

    def keep(self, are_kept: Sequence[bool]) -> None:
        """Of the jobs under way, oldest first, nobody waits for the others any more."""
        self._outstanding = deque(
            each for each, is_kept in zip(self._outstanding, are_kept, strict=True) if is_kept
        )

    def renew(self, next_round_id: Callable[[], int]) -> None:
        """The jobs under way again, as new ones: what the verifier says to the old ones is no answer."""
        jobs = [(replace(each.job, round_id=next_round_id()), each.deadline_s) for each in self._outstanding]
        self.forget()
        for job, deadline_s in jobs:
            self.give(job, deadline_s)

    # ------------------------------------------------------------------------------------- answers

    def first_answer(
        self, attempt_s: float, connect_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Outstanding:
        """The oldest job, once it is answered; it is under way no more.

        After a silent `attempt_s` all are sent again on a fresh connection, for as long as the oldest one's
        deadline lasts (patient: `recover_timeout_s`). A lost connection has `connect_s` to come back. The
        first fresh connection is a trial of the link, and lasts a whole deadline.
        `meanwhile` runs once, after the sending. Raises `RoundTimeoutError`, or `LinkError` when patient.
        """
        lifeline, first = self._lifeline, self._outstanding[0]
        start_s = max(first.given_s, self._last_answer_s)
        give_up_s = start_s + (self._recover_timeout_s if self._is_patient else first.deadline_s)
        attempt_end_s, reconnect_by_s = start_s + attempt_s, start_s + connect_s
        is_trial_due = isinstance(first.job, VerifyRequest)
        while first.reply is None:
            lifeline.check_cancelled()
            try:
                connection = lifeline.wait(min(give_up_s, reconnect_by_s))
                if first.sent_on is not connection:
                    self._send_on(connection)
                    attempt_end_s = self._clock() + attempt_s
                    if is_trial_due:
                        give_up_s, is_trial_due = max(give_up_s, self._clock() + first.deadline_s), False
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
                lifeline.drop()
                reconnect_by_s = self._clock() + connect_s
                continue
            # Only with nothing left to read: an answer may have come while the edge was drafting.
            if self._clock() >= give_up_s:
                raise self._give_up(start_s)
            if self._clock() >= attempt_end_s:
                attempt_s = min(2 * attempt_s, _MAX_ATTEMPT_S)
                lifeline.drop()
        self._last_answer_s = first.arrived_s
        return self._outstanding.popleft()

    def poll(self) -> None:
        """Takes in what has arrived, without waiting."""
        try:
            while self._lifeline.connection is not None and self._receive(self._clock()):
                pass
        except LinkError:
            self._lifeline.drop()

    def take_late_verdicts(self) -> list[tuple[Outstanding, Verdict]]:
        """Verdicts of timed-out rounds that arrived since, oldest first, with what they answer."""
        late, self._late = self._late, []
        return late

    def set_aside(self, reply: SessionResponse) -> None:
        """Not what we wait for: a late verdict is kept for the session, the rest is ignored.

        `Draining` too: rounds of open sessions are still answered, and the stream's end makes us reconnect.
        """
        if isinstance(reply, Verdict) and (round_ := self._timed_out.pop(reply.round_id, None)):
            round_.arrived_s = self._lifeline.arrival_s
            self._late.append((round_, reply))

    # ------------------------------------------------------------------------------------ messages

    def _send_on(self, connection: Connection) -> None:
        """All that was not sent on this connection and not answered yet, in order. Raises `LinkError`."""
        traffic = self._lifeline.traffic
        for each in self._outstanding:
            if each.sent_on is connection or each.reply is not None:
                continue
            before = traffic.bytes_up
            connection.send(each.job)
            each.bytes_up += traffic.bytes_up - before
            each.is_ordinary = each.is_ordinary and each.sent_on is None
            each.sent_on, each.sent_s = connection, self._clock()

    def _receive(self, until_s: float) -> bool:
        """Takes one message in; False when there was none. Raises `LinkError`."""
        before = self._lifeline.traffic.bytes_down
        reply = self._lifeline.receive(until_s)
        if reply is None:
            return False
        if isinstance(reply, Verdict | RoundError):
            self.newest_answered = max(self.newest_answered, reply.round_id)
        for each in self._outstanding:
            if each.answers(reply):
                assert isinstance(reply, FinalReply)
                each.reply, each.arrived_s = reply, self._lifeline.arrival_s
                each.bytes_down += self._lifeline.traffic.bytes_down - before
                return True
            if isinstance(reply, Progress) and reply.round_id == each.job.round_id:
                each.is_ordinary, each.progress_s = False, self._clock()
                return True
        self.set_aside(reply)
        return True

    def _give_up(self, start_s: float) -> LinkError:
        after_s = self._clock() - start_s
        text = f"no answer from {self._lifeline.address} within {after_s:.1f} s{self._lifeline.trouble}"
        self._lifeline.suspect()
        for each in self._outstanding:
            if isinstance(each.job, VerifyRequest):
                self._timed_out[each.job.round_id] = each
        while len(self._timed_out) > _MAX_TIMED_OUT:
            self._timed_out.popitem(last=False)
        self.forget()
        return LinkError(text) if self._is_patient else RoundTimeoutError(text)
