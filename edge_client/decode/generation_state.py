"""One generation under way: the text, both sides it comes from, and what the loops share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.common.errors import RoundFailedError
from outrider.common.types import Method, ModelInfo, Origin, RoundError, RoundErrorCode, TokenLogprobs
from outrider.edge_client.controller.acceptance_prior import Circumstances, Experience
from outrider.edge_client.controller.mode_policy import ModeChoice, Way
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.core.options import SessionOptions
from outrider.edge_client.core.stats import RoundRecord, SessionStats
from outrider.edge_client.decode.correction import PendingCorrection
from outrider.edge_client.decode.proposer import Proposer
from outrider.edge_client.decode.token_buffer import SessionText
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

log = logging.getLogger(__name__)

_MAX_REPAIRS = 3


@dataclass(slots=True)
class Decoding:
    """One generation under way. `model` is None until the verifier answered an opening."""

    session_id: bytes
    options: SessionOptions
    text: SessionText
    proposer: Proposer
    stats: SessionStats
    verifier: RemoteVerifier | None = None
    window: RoundWindow = field(default_factory=RoundWindow)
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
        wanted = self.proposer.depth.next_depth()
        return wanted if self.model is None else min(wanted, self.model.limits.max_draft_tokens)

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
        self.proposer.depth.observe(record)
        self.window.observe(record)
