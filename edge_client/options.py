"""What one generation is asked for, and the parts its loops share."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.errors import RoundFailedError
from common.methods import DEFAULT_SUPPORT_SIZE
from common.types import (
    Draft,
    Method,
    MethodParams,
    ModelInfo,
    Origin,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Signals,
    StopParams,
    TokenIds,
    TokenLogprobs,
)
from edge_client.correction import PendingCorrection
from edge_client.depth.base import DepthPolicy
from edge_client.drafter import Drafter
from edge_client.drafting.base import ShouldStop, Stop
from edge_client.events import TokenEvent
from edge_client.experience import Circumstances, Experience
from edge_client.gate.gate import Gate, Judgement
from edge_client.gate.rules import CONTEXT_TOKENS
from edge_client.mode_choice import ModeChoice, Way
from edge_client.pipeline import RoundWindow
from edge_client.remote_verifier import RemoteVerifier
from edge_client.stats import RoundRecord, SessionStats
from edge_client.text import SessionText

log = logging.getLogger(__name__)

_MAX_REPAIRS = 3


class Mode(enum.StrEnum):
    SPECULATIVE = "speculative"  # the draft proposes, the verifier decides
    CLOUD_ONLY = "cloud-only"  # the target alone, streamed
    CO_LOCATED = "co-located"  # draft and target both in the verifier, streamed
    EDGE_ONLY = "edge-only"  # the draft alone, unverified
    AUTO = "auto"  # rounds, pipelined rounds or the target's stream, whichever is soonest

    @property
    def has_draft(self) -> bool:
        """Whether the edge drafts."""
        return self in (Mode.SPECULATIVE, Mode.EDGE_ONLY, Mode.AUTO)


class OnTimeout(enum.StrEnum):
    FIRST_TOKEN = "first_token"  # keep the draft's first token, marked
    EDGE_ONLY = "edge_only"  # go on alone until the link is back
    WAIT = "wait"  # exact: wait and resend
    FAIL = "fail"  # end with an error


@dataclass(frozen=True, slots=True)
class SessionOptions:
    mode: Mode = Mode.SPECULATIVE
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    method: Method = Method.COUPLED
    method_params: MethodParams = field(default_factory=MethodParams)
    support_size: int = DEFAULT_SUPPORT_SIZE  # ids a drafted token's distribution is sent with
    num_logprobs: int = 0  # most probable ids told with each token's log-probabilities; 0: none are asked for
    on_timeout: OnTimeout = OnTimeout.FIRST_TOKEN
    recover_timeout_s: float = 60.0
    is_reverified: bool = False  # unverified tokens are judged later, and taken back where they are wrong
    is_target_change_allowed: bool = False
    tokenizer_fingerprint: str = ""


@dataclass(slots=True)
class Decoding:
    """One generation under way. `model` is None until the verifier answered an opening."""

    session_id: bytes
    options: SessionOptions
    text: SessionText
    depth: DepthPolicy
    stats: SessionStats
    verifier: RemoteVerifier | None = None
    drafter: Drafter | None = None
    window: RoundWindow = field(default_factory=RoundWindow)
    gate: Gate | None = None
    experience: Experience | None = None  # of texts before, for the choice of the mode
    model: ModelInfo | None = None
    must_open: bool = True  # the verifier has no session, or not this text
    pending: PendingCorrection | None = None
    failures: list[RoundError] = field(default_factory=list)  # since the last answer that made text
    has_given_up: bool = False  # on a verdict for the unverified tokens of a text that ended
    ended_s: float | None = None  # when a verdict for them was first missed, on the lifeline's clock

    @property
    def remote(self) -> RemoteVerifier:
        assert self.verifier is not None, "this mode has no verifier"
        return self.verifier

    def add(
        self,
        token_ids: tuple[int, ...],
        origins: tuple[Origin, ...],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[TokenEvent]:
        """`logprobs` of the first tokens, as far as they are known."""
        events = self.text.add(token_ids, origins, logprobs)
        if not self.options.method.is_exact:
            method = self.options.method
            events = [replace(e, approximation=method) if e.origin.is_judged else e for e in events]
        self.stats.token_times_ns += [event.time_ns for event in events]
        if events:
            self.pending = None
        return events

    @property
    def is_owed(self) -> bool:
        """Whether kept tokens are still to be judged."""
        text = self.text
        return text.is_reverified and not self.has_given_up and text.settled_position < text.position

    @property
    def is_over(self) -> bool:
        return self.text.finish is not None and not self.is_owed

    @property
    def is_to_stream(self) -> bool:
        """Whether the mode is chosen on the way, and is the target's own stream now."""
        choice = self.window.choice
        return choice is not None and choice.current is Way.CLOUD_ONLY

    def recall(self, model: ModelInfo) -> None:
        """At the first opening: what the choice of the mode begins with."""
        if self.experience is not None and (choice := self._taught_choice) is not None:
            choice.expect(self.experience.belief(self._circumstances(model)))

    def remember(self) -> None:
        """At the end, for the texts behind this one."""
        if self.experience is None or self.model is None:
            return
        if (choice := self._taught_choice) is not None and choice.has_judged:
            self.experience.learn(self._circumstances(self.model), choice.belief)

    @property
    def _taught_choice(self) -> ModeChoice | None:
        return self.window.choice if self.options.method is Method.COUPLED else None

    def _circumstances(self, model: ModelInfo) -> Circumstances:
        return Circumstances.of(model.target_fingerprint, self.options.sampling.temperature)

    @property
    def context_room(self) -> int:
        """How many more tokens the target's context takes."""
        if self.model is None:
            return self.text.num_remaining
        return max(0, self.model.limits.max_context - self.text.position)

    def num_to_draft(self, num_assumed: int = 0) -> int:
        """The next round's depth, behind `num_assumed` tokens not known yet: never past `max_new_tokens` or
        the context, nor what the verifier takes."""
        if self.text.finish is not None:
            return 0
        room = min(self.text.num_remaining, self.context_room) - num_assumed - 1
        return max(0, min(self.next_depth(), room))

    def next_depth(self) -> int:
        """The policy's depth, or the most that the verifier takes in a round."""
        wanted = self.depth.next_depth()
        return wanted if self.model is None else min(wanted, self.model.limits.max_draft_tokens)

    def propose(
        self,
        num_draft_tokens: int,
        assumed: TokenIds = (),
        is_spoilt: Callable[[], bool] | None = None,
        *,
        is_gated: bool = False,
    ) -> tuple[Draft, float]:
        """A draft behind the text and what is `assumed` to follow, and what it took, in ms.

        `is_spoilt` is asked after each token whether the assumption fell: the draft then ends, for nothing.
        `is_gated`: a stop-gate may end it, at its first token too. What is drafted to be kept is not gated.
        """
        if self.drafter is None or num_draft_tokens == 0:
            return Draft((), ()), 0.0
        rule = self.depth.stop_rule()
        if is_gated and self.gate is not None:
            rule = _both(self.gate.stop_rule(self._behind(assumed)), rule)
        if is_spoilt is not None:
            rule = _unless_spoilt(is_spoilt, rule)
        return self.drafter.propose(self.text.chain.token_ids, num_draft_tokens, rule, assumed)

    def judge(self, draft: Draft, assumed: TokenIds = ()) -> Judgement | None:
        """What the gate says of a draft made behind `assumed`; None without one."""
        return None if self.gate is None else self.gate.judge(draft, self._behind(assumed))

    def _behind(self, assumed: TokenIds) -> Sequence[int]:
        """As much of the text as a text rule looks at, and what is assumed to follow."""
        return (*self.text.chain.token_ids[-CONTEXT_TOKENS:], *assumed)

    def note_failure(self, error: RoundError) -> None:
        """Counts a repair. Raises `RoundFailedError` for the second bug over there, or a fourth repair."""
        log.warning("repairing the session: %s: %s", error.code, error.message)
        self.failures.append(error)
        num_internal = sum(each.code is RoundErrorCode.INTERNAL for each in self.failures)
        if num_internal > 1 or len(self.failures) > _MAX_REPAIRS:
            raise RoundFailedError(error)

    def note_success(self) -> None:
        self.failures.clear()

    def record(self, record: RoundRecord) -> None:
        self.stats.rounds.append(record)
        self.depth.observe(record)
        self.window.observe(record)


def _both(one: ShouldStop | None, other: ShouldStop | None) -> ShouldStop | None:
    """Whichever drops more, with both asked about every token."""
    if one is None or other is None:
        return one or other

    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        stops = one(token_id, signals, num_drafted), other(token_id, signals, num_drafted)
        return Stop.BEFORE if Stop.BEFORE in stops else Stop.AFTER if Stop.AFTER in stops else Stop.NO

    return should_stop


def _unless_spoilt(is_spoilt: Callable[[], bool], rule: ShouldStop | None) -> ShouldStop:
    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        if is_spoilt():
            return Stop.AFTER
        return Stop.NO if rule is None else rule(token_id, signals, num_drafted)

    return should_stop
