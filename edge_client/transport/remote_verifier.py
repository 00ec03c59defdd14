"""The verifier as decoding sees it: openings, rounds and generations, each with its final answer.

Deadlines, refusals and errors are handled here. What must change the sequence (a rebuild, a fallback token)
is left to the session, by exception. How requests travel, and travel again after a lost connection, is
`outrider.edge_client.transport.in_flight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import (
    IncompatibleError,
    InvalidFieldError,
    OutriderError,
    RoundFailedError,
    RoundTimeoutError,
)
from outrider.common.types import (
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
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.transport.answers import check_answer
from outrider.edge_client.transport.connection import ConnectionManager
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.in_flight import FinalReply, InFlight
from outrider.edge_client.transport.link.base import Connection, Traffic, UnreadableAnswerError, VerifierLink
from outrider.edge_client.transport.threads import SYSTEM_THREADS, Threads

# How long the end of a text waits for the answer to its close. Cancelling the stream earlier discards what the verifier
# has not read yet, and it would keep the session until that expires.
CLOSE_TIMEOUT_S = 2.0
DEAD_LINK_CLOSE_TIMEOUT_S = 0.3  # where the last round timed out or lost its connection
OPEN_ATTEMPT_S = 5.0  # an opening that computes for longer reports `Progress` earlier
_MIN_RETRY_S = 0.02
_OTHER_MODEL = {  # by the field that the verifier refuses: what is wrong, and the fix
    "tokenizer_fingerprint": (
        "the draft's tokenizer is not the target's",
        "name a draft of the target's family with --draft DIR; `edge-client doctor` says which target it is",
    ),
    "target_fingerprint": (
        "the verifier that answers now has another target than the one that began this text",
        "begin again, or continue with it by --allow-target-change",
    ),
}


class _SessionError(OutriderError):
    """Carries the verifier's error to the session, which repairs it."""

    def __init__(self, error: RoundError) -> None:
        super().__init__(error.message)
        self.error = error


class SessionLostError(_SessionError):
    """The verifier has no such session, or lost it to a bug of its own: it must be opened again."""


class UnknownPrefixError(_SessionError):
    """The verifier's sequence differs from the edge's; `error` has its position."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A round's verdict with its times and bytes. `wait_s` is from the submission to the arrival; `came_s` is
    the arrival, or the later moment at which the verdict was asked for; bytes are of whole messages.
    `is_ordinary`: it was sent once, not refused, and took no long recomputation."""

    verdict: Verdict
    came_s: float
    wait_s: float
    bytes_up: int
    bytes_down: int
    is_ordinary: bool = True


class RemoteVerifier:
    """One session with a verifier over `link`. `is_patient` (the policy `wait`) sends requests again on fresh
    connections until `recover_timeout_s`."""

    def __init__(
        self,
        link: VerifierLink,
        deadline: RoundDeadline,
        *,
        recover_timeout_s: float = 60.0,
        is_patient: bool = False,
        num_tokens: int = 1 << 32,
        clock: Clock = SYSTEM_CLOCK,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """Ids at or above `num_tokens` do not exist here: an answer with one is rejected."""
        self.clock = clock
        self.deadline = deadline
        self.num_refusals = 0
        self._connect_s = math.inf
        self._recover_timeout_s = recover_timeout_s
        self._is_patient = is_patient
        self._now = clock.now
        self._last_round_id = 0
        self._connections = ConnectionManager(link, clock, threads)
        self._num_tokens = num_tokens
        self._in_flight = InFlight(self._connections, recover_timeout_s, is_patient, clock, self._check)

    def next_round_id(self) -> int:
        """Returns a round id that was not used before."""
        self._last_round_id += 1
        return self._last_round_id

    # -------------------------------------------------------------------------------- connection

    @property
    def address(self) -> str:
        return self._connections.address

    @property
    def traffic(self) -> Traffic:
        return self._connections.traffic

    @property
    def num_reconnects(self) -> int:
        return self._connections.num_reconnects

    @property
    def is_link_up(self) -> bool:
        """Returns whether the last round neither timed out nor lost its connection."""
        return self._connections.breaker.is_closed

    @property
    def silent_for_s(self) -> float:
        """Returns the seconds since the verifier's last message."""
        return self._connections.silent_for_s

    def connect(self, at_most_s: float = math.inf) -> None:
        """Makes the first connection. Raises `LinkError` once attempts fail (patient: after
        `recover_timeout_s`), and after `at_most_s`, then still trying."""
        start_s = self._now()
        self._connections.connect(self._recover_timeout_s if self._is_patient else 0.0, at_most_s)
        self._connect_s = self._now() - start_s

    def drop_connection(self) -> None:
        """Closes the connection and looks for another in the background."""
        self._connections.drop()

    def mark_suspect(self) -> None:
        """Looks for a fresh connection in the background, and keeps this one until then."""
        self._connections.mark_suspect()

    def poll_recovery(self) -> bool:
        """Returns whether a link that failed seems to work again."""
        is_back, reply = self._connections.poll_recovery()
        if reply is not None:
            self._in_flight.set_aside(reply)
        return is_back

    def start_rtt_probe(self) -> None:
        """Measures a round trip beside the messages under way, where the connection can."""
        if (connection := self._connections.connection) is not None:
            connection.start_rtt_probe()

    def take_rtt(self) -> float | None:
        """Returns the round trip that the last probe measured in seconds, once."""
        connection = self._connections.connection
        return connection.take_rtt() if connection is not None else None

    def cancel(self) -> None:
        """Ends any wait by `CancelledByUser`. Safe in a signal handler and in other threads."""
        self._connections.cancel()

    def check_cancelled(self) -> None:
        """Raises `CancelledByUser` after `cancel`."""
        self._connections.check_cancelled()

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises `CancelledByUser` where `cancel` is called meanwhile."""
        self._connections.sleep(seconds)

    # ---------------------------------------------------------------------------------- openings

    def open(
        self,
        request: OpenRequest,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Opened, float]:
        """Opens the session, and runs `meanwhile` once while the verifier computes the prompt. Returns the answer,
        and the seconds from the last sending to its arrival, however long `meanwhile` took.

        Waits `timeout_s` for a first message (default, and after `Progress`: `recover_timeout_s`); unless
        patient, a link that breaks meanwhile gets one deadline to return.
        Raises `IncompatibleError`, `RoundFailedError`, `SessionLostError`, `RoundTimeoutError`, `LinkError`.
        """
        in_flight = self._in_flight
        in_flight.clear()
        give_up_s = self._now() + self._recover_timeout_s
        total_s = timeout_s or self._recover_timeout_s
        # An opening may compute for long, but must not take long to connect.
        connect_s = self._recover_timeout_s if self._is_patient else self.deadline.seconds
        while True:
            in_flight.submit(request, total_s)
            answered = in_flight.first_answer(min(OPEN_ATTEMPT_S, total_s), connect_s, meanwhile)
            reply = answered.reply
            if isinstance(reply, Opened):
                self._num_tokens = min(self._num_tokens, reply.model.num_tokens)
                # Connecting takes two or three round trips, opening one and the prompt's computation.
                self.deadline.expect(min(self._connect_s, answered.wait_s))
                return reply, answered.trip_s
            assert isinstance(reply, RoundError), "checked when it came"
            self._handle_error(reply, give_up_s)
            request, meanwhile = replace(request, round_id=self.next_round_id()), None

    # ------------------------------------------------------------------------------------ rounds

    def deadline_ms(self, drafted_s: float = 0.0) -> int:
        """Returns the deadline to send with the next round; 0, none, where patient: then a late answer serves
        as well. It counts from the arrival, and each of the rounds before may take its own."""
        if self._is_patient:
            return 0
        num_before = len(self._in_flight.outstanding)
        return math.ceil((num_before + 1) * self.deadline.patience_s(drafted_s) * 1e3)

    def submit(self, request: VerifyRequest, drafted_s: float = 0.0) -> None:
        """Sends a round after those in flight; never waits. `verdict` answers the oldest.

        Its deadline counts from the beginning of its draft, `drafted_s` ago; where it was drafted while
        others were in flight (0), from the answer before.
        """
        self._in_flight.submit(request, self.deadline.patience_s(drafted_s), drafted_s)

    def verdict(self) -> Answer:
        """Waits for the oldest round's verdict. Raises `RoundTimeoutError` after its deadline; patient:
        `LinkError` after `recover_timeout_s`. Also `SessionLostError`, `UnknownPrefixError`,
        `RoundFailedError`, `CallRejectedError`. After an error no round is in flight any more.
        """
        in_flight, asked_s, is_refused = self._in_flight, self._now(), False
        give_up_s = asked_s + self._recover_timeout_s
        while True:
            deadline_s = in_flight.outstanding[0].deadline_s
            connect_s = self._recover_timeout_s if self._is_patient else deadline_s
            answered = in_flight.first_answer(deadline_s, connect_s)
            reply = answered.reply
            if isinstance(reply, Verdict):
                if answered.is_ordinary:
                    self.deadline.observe(answered.round_s)
                elif answered.progress_s is None:
                    self.deadline.observe_late(answered.trip_s)
                came_s = max(asked_s, answered.arrived_s)
                return Answer(
                    reply,
                    came_s,
                    answered.wait_s,
                    answered.bytes_up,
                    answered.bytes_down,
                    answered.is_ordinary and not is_refused,
                )
            assert isinstance(reply, RoundError), "checked when it came"
            try:
                self._handle_error(reply, give_up_s)
            except OutriderError:
                in_flight.clear()
                raise
            is_refused = True
            in_flight.resubmit(answered, self.next_round_id)  # neither it nor those after it were applied

    @property
    def num_unanswered(self) -> int:
        """Returns how many rounds may still be queued at the verifier, dropped ones included."""
        return self._last_round_id - self._in_flight.newest_answered

    def poll(self, wait_s: float = 0.0) -> Sequence[FinalReply | None]:
        """Returns the replies that arrived for the rounds in flight, oldest first, None where there is none.
        Waits for `wait_s` at most, and raises no `LinkError`."""
        self._in_flight.poll(wait_s)
        return [each.reply for each in self._in_flight.outstanding]

    def retain(self, are_kept: Sequence[bool]) -> None:
        """Keeps those flagged of the rounds in flight, oldest first, and ignores the answers to the others."""
        self._in_flight.retain(are_kept)

    def take_late_verdicts(self) -> list[tuple[VerifyRequest, Verdict]]:
        """Returns the verdicts of timed-out rounds that arrived since, oldest first, with their requests."""
        late = self._in_flight.take_late_verdicts()
        for round_, _ in late:
            self.deadline.observe_late(round_.trip_s)
        return [(round_.job, verdict) for round_, verdict in late if isinstance(round_.job, VerifyRequest)]

    # -------------------------------------------------------------------------------- generation

    def generate(
        self, request: GenerateRequest, silence_s: float, patience_s: float
    ) -> Iterator[GeneratedTokens]:
        """Yields the stream of one `Generate`. After a refusal it waits for the time that the verifier named
        and ends early; where that is longer than `patience_s`, the refusal is a `RoundFailedError`. It also ends early
        where a fresh connection has replaced a suspect one, which ended the stream with it.

        Raises `RoundTimeoutError` after `silence_s` without a message, `LinkError` when the connection
        breaks, and the errors of `verdict`.
        """
        connections, give_up_s = self._connections, self._now() + patience_s
        sent_on = connections.wait(self._now() + self._recover_timeout_s)
        connections.send(request)
        silent_at_s = self._now() + silence_s
        while connections.connection is sent_on:
            connections.check_cancelled()
            reply = connections.receive(silent_at_s)
            if reply is None and self._now() >= silent_at_s:
                raise RoundTimeoutError(f"no token from {connections.address} for {silence_s:.1f} s")
            if getattr(reply, "round_id", 0) != request.round_id:
                continue
            silent_at_s = self._now() + silence_s
            assert reply is not None, "a reply with a round id"
            self._check(request, reply)
            match reply:
                case GeneratedTokens():
                    yield reply
                    if reply.is_last:
                        return
                case Progress():
                    silent_at_s = self._now() + self._recover_timeout_s
                case RoundError():
                    self._handle_error(reply, give_up_s)
                    return

    def stop_generating(self, request: GenerateRequest) -> None:
        """Asks for the end of a stream, which continues until its last message. Raises `LinkError`."""
        self._connections.send(CancelRequest(request.round_id))

    # ----------------------------------------------------------------------------------- closing

    def close(self, is_cancelled: bool = False) -> None:
        """Closes the session at the verifier (waiting briefly), then the connection. Never raises."""
        connection = self._connections.detach()
        if connection is None:
            return
        try:
            if is_cancelled:
                connection.send(CancelRequest(self._last_round_id))
            connection.send(CloseRequest())
            self._wait_until_closed(connection)
        except OutriderError:
            pass  # the verifier evicts idle sessions
        finally:
            connection.close()

    def _wait_until_closed(self, connection: Connection) -> None:
        end_s = self._now() + (CLOSE_TIMEOUT_S if self.is_link_up else DEAD_LINK_CLOSE_TIMEOUT_S)
        while (left_s := end_s - self._now()) > 0:
            if isinstance(connection.receive(left_s), Closed):
                return

    def _check(self, request: SessionRequest, reply: SessionResponse) -> None:
        try:
            check_answer(request, reply, self._num_tokens)
        except InvalidFieldError as error:
            raise UnreadableAnswerError(self.address, error) from error

    def _handle_error(self, error: RoundError, give_up_s: float) -> None:
        """Returns when the request should be sent again, under a new id; raises otherwise."""
        match error.code:
            case RoundErrorCode.REFUSED | RoundErrorCode.DRAINING:
                self.num_refusals += 1
                wait_s = max(_MIN_RETRY_S, error.retry_after_ms / 1000.0)
                if self._now() + wait_s > give_up_s:
                    raise RoundFailedError(error)
                if error.code is RoundErrorCode.DRAINING:
                    self._connections.drop()
                self._connections.sleep(wait_s)
            case RoundErrorCode.UNKNOWN_SESSION | RoundErrorCode.INTERNAL:
                raise SessionLostError(error)
            case RoundErrorCode.UNKNOWN_PREFIX | RoundErrorCode.STALE:
                raise UnknownPrefixError(error)
            case RoundErrorCode.INVALID if error.field in _OTHER_MODEL:
                raise IncompatibleError(*_OTHER_MODEL[error.field])
            case _:
                raise RoundFailedError(error)
