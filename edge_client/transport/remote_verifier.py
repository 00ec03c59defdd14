"""Openings, rounds and generations, each into its final answer: deadlines, refusals, errors by their meaning.

What must change the text (a rebuild, a fallback token) is the session's business, told by exception. How jobs
travel, and travel again after a lost connection, is `outrider.edge_client.transport.in_flight`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.common.errors import IncompatibleError, OutriderError, RoundFailedError, RoundTimeoutError
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
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.transport.connection import Lifeline
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.in_flight import Exchange, FinalReply
from outrider.edge_client.transport.link.base import Connection, VerifierLink

CLOSE_TIMEOUT_S = 0.3
OPEN_ATTEMPT_S = 5.0  # an opening that computes says so earlier, by `Progress`
_MIN_RETRY_S = 0.02


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
    """A round's verdict, and what its exchange took: `wait_s` from its sending on, whole messages' bytes.
    `came_s` is when it came or, where it lay here, was asked for."""

    verdict: Verdict
    came_s: float
    wait_s: float
    bytes_up: int
    bytes_down: int


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
        self._connect_s = math.inf
        self.num_refusals = 0
        self._recover_timeout_s = recover_timeout_s
        self._is_patient = is_patient
        self._clock = clock
        self._last_round_id = 0
        self._exchange = Exchange(self.lifeline, recover_timeout_s, is_patient, clock)

    def next_round_id(self) -> int:
        self._last_round_id += 1
        return self._last_round_id

    def connect(self, at_most_s: float = math.inf) -> None:
        """The first connection. Raises `LinkError`: once attempts fail, or when patient, after
        `recover_timeout_s`; after `at_most_s` too, and then goes on trying."""
        start_s = self._clock()
        self.lifeline.connect(self._recover_timeout_s if self._is_patient else 0.0, at_most_s)
        self._connect_s = self._clock() - start_s

    def is_back(self) -> bool:
        """Whether a link that failed seems to work again."""
        is_alive, reply = self.lifeline.take_sign_of_life()
        if reply is not None:
            self._exchange.set_aside(reply)
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
        exchange = self._exchange
        exchange.forget()
        give_up_s = self._clock() + self._recover_timeout_s
        total_s = timeout_s or self._recover_timeout_s
        # A job that has long to compute has not long to connect.
        connect_s = self._recover_timeout_s if self._is_patient else self.deadline.seconds
        while True:
            exchange.give(request, total_s)
            answered = exchange.first_answer(min(OPEN_ATTEMPT_S, total_s), connect_s, meanwhile)
            reply = answered.reply
            if isinstance(reply, Opened):
                # Both are a round trip and more: to connect two or three, to open the prompt's computation.
                self.deadline.expect(min(self._connect_s, answered.wait_s))
                return reply
            assert isinstance(reply, RoundError), f"an opening answered by {reply}"
            self._handle_error(reply, give_up_s)
            request, meanwhile = replace(request, round_id=self.next_round_id()), None

    def deadline_ms(self, drafted_s: float = 0.0) -> int:
        """What the next round tells of its deadline; 0, none, where patient: then a late answer serves as
        well. It counts from the arrival, and each of the rounds before may take its own."""
        if self._is_patient:
            return 0
        num_before = len(self._exchange.outstanding)
        return math.ceil((num_before + 1) * self.deadline.patience_s(drafted_s) * 1e3)

    def submit(self, request: VerifyRequest, drafted_s: float = 0.0) -> None:
        """A round under way, behind those that are; never waits. `verdict` answers the oldest.

        Its deadline counts from the beginning of its draft, `drafted_s` ago; where it was drafted behind
        others (0), from the answer before.
        """
        self._exchange.give(request, self.deadline.patience_s(drafted_s), drafted_s)

    def verdict(self) -> Answer:
        """The oldest round's. Raises `RoundTimeoutError` after its deadline; patient: `LinkError` after
        `recover_timeout_s`. Also `SessionLostError`, `UnknownPrefixError`, `RoundFailedError`,
        `CallRejectedError`. After an error no round is under way any more.
        """
        exchange, asked_s = self._exchange, self._clock()
        give_up_s = asked_s + self._recover_timeout_s
        while True:
            deadline_s = exchange.outstanding[0].deadline_s
            connect_s = self._recover_timeout_s if self._is_patient else deadline_s
            answered = exchange.first_answer(deadline_s, connect_s)
            reply = answered.reply
            if isinstance(reply, Verdict):
                if answered.is_ordinary:
                    self.deadline.observe(answered.round_s)
                elif answered.progress_s is None:
                    self.deadline.observe_late(answered.trip_s)
                came_s = max(asked_s, answered.arrived_s)
                return Answer(reply, came_s, answered.wait_s, answered.bytes_up, answered.bytes_down)
            assert isinstance(reply, RoundError), f"a round answered by {reply}"
            try:
                self._handle_error(reply, give_up_s)
            except OutriderError:
                exchange.forget()
                raise
            # A refused round was not applied, nor any behind it: under fresh ids none is taken for old.
            exchange.outstanding.appendleft(answered)
            exchange.renew(self.next_round_id)

    @property
    def num_unanswered(self) -> int:
        """Rounds that may still wait at the verifier, those that nobody here waits for any more included: it
        takes them in order."""
        return self._last_round_id - self._exchange.newest_answered

    def poll(self) -> Sequence[FinalReply | None]:
        """Of the rounds under way, oldest first: what has arrived, without waiting. Raises no `LinkError`."""
        self._exchange.poll()
        return [each.reply for each in self._exchange.outstanding]

    def keep_rounds(self, are_kept: Sequence[bool]) -> None:
        """The other rounds under way build on a text that is none: their answers are nobody's."""
        self._exchange.keep(are_kept)

    def generate(
        self, request: GenerateRequest, silence_s: float, patience_s: float
    ) -> Iterator[GeneratedTokens]:
        """The stream of one `Generate`; ends early after a refusal, once its hint was waited for: within
        `patience_s`, else the refusal is a `RoundFailedError`.

        Raises `RoundTimeoutError` after `silence_s` without a message, `LinkError` when the connection
        breaks, and the errors of `verify`.
        """
        lifeline, give_up_s = self.lifeline, self._clock() + patience_s
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
                    self._handle_error(reply, give_up_s)
                    return

    def cancel(self, request: GenerateRequest) -> None:
        """Asks for the end of a stream, which goes on until its last message. Raises `LinkError`."""
        self.lifeline.send(CancelRequest(request.round_id))

    def take_late_verdicts(self) -> list[tuple[VerifyRequest, Verdict]]:
        """Verdicts of timed-out rounds that arrived since, oldest first, with what they answer."""
        late = self._exchange.take_late_verdicts()
        for round_, _ in late:
            self.deadline.observe_late(round_.trip_s)
        return [(round_.job, verdict) for round_, verdict in late if isinstance(round_.job, VerifyRequest)]

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
