"""One generation, from a prompt to its last token: `EdgeSession.generate()` yields events.

The loops are in `decode`, but for edge-only's, which is here; this class opens, closes, and keeps the result
whatever happens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import LinkError
from outrider.common.methods import num_support
from outrider.common.stopping import holding_back
from outrider.common.types import FinishReason, Method, ModelInfo, Origin, TokenIds, TokenLogprobs
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import EndEvent, SessionEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.core.stats import SessionStats
from outrider.edge_client.decode.auto import run_auto
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.fallback import continue_alone
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.decode.proposer import Proposer
from outrider.edge_client.decode.speculative import SpeculativeLoop
from outrider.edge_client.decode.token_buffer import Decode, TokenBuffer
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.learned.learner import Learner
from outrider.edge_client.gate.gate import Gate
from outrider.edge_client.transport.connection import CancelledByUser
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

_ALONE_AFTER_S = 1.0  # without a first connection, where the edge may begin by itself


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The result of a generation; after an error or a cancel, as far as it came."""

    text: str
    token_ids: TokenIds  # new tokens only
    origins: tuple[Origin, ...]
    is_verified: tuple[bool, ...]
    finish_reason: FinishReason
    model: ModelInfo | None
    stats: SessionStats
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one a token; all None where they were not asked for
    method: Method = Method.COUPLED

    @property
    def token_is_approximate(self) -> tuple[bool, ...]:
        """Returns for each new token whether an approximate method accepted it."""
        is_approximate = not self.method.is_exact
        return tuple(is_approximate and origin.is_judged for origin in self.origins)

    @property
    def num_unverified_tokens(self) -> int:
        return self.is_verified.count(False)

    @property
    def unverified_note(self) -> str:
        """Returns how many tokens are unverified, and why, for a person; empty where none is."""
        if not (number := self.num_unverified_tokens):
            return ""
        why = ": no answer came in time" if self.stats.num_timeouts else ""
        return f"{number} of {len(self.token_ids)} tokens are the draft's own, unverified{why}"


def new_session_id() -> bytes:
    """Returns 16 random bytes."""
    return secrets.token_bytes(16)


def _create_drafter(
    draft: DraftModel, options: SessionOptions, num_prompt_tokens: int, min_draft_s: float, clock: Clock
) -> Drafter:
    """Creates the draft side. Alone, the draft samples from its whole distribution: there is no verdict that
    would need a support."""
    is_alone = options.mode is ExecutionMode.EDGE_ONLY
    num_ids = 0 if is_alone else num_support(options.method, options.support_size)
    sampling = holding_back(options.sampling, options.stop.stop_token_ids)
    return Drafter(draft, sampling, num_prompt_tokens, num_ids, min_draft_s, clock)


class EdgeSession:
    """Generates once. `verifier` is None in edge-only mode, `draft` in cloud-only and co-located mode.

    `decode` turns an id into the text that became final with it; `renew_decode` makes another that has seen
    the prompt alone, which a rollback needs (None: `decode` has no state). `acceptance_prior` and `learner` are
    shared with other sessions of the same draft. The session closes `verifier`, not `draft`. `clock` is for edge-only
    mode: the other modes use the verifier's.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        options: SessionOptions,
        *,
        decode: Decode,
        renew_decode: Callable[[], Decode] | None = None,
        verifier: RemoteVerifier | None = None,
        draft: DraftModel | None = None,
        depth: DepthPolicy | None = None,
        window: RoundWindow | None = None,
        conditions: Conditions | None = None,
        gate: Gate | None = None,
        acceptance_prior: AcceptancePrior | None = None,
        learner: Learner | None = None,
        session_id: bytes | None = None,
        min_draft_s: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        assert prompt_ids, "an empty prompt"
        self._draft = draft
        self._is_cancelled = False
        clock = clock if verifier is None else verifier.clock
        drafter = _create_drafter(draft, options, len(prompt_ids), min_draft_s, clock) if draft else None
        tokens = TokenBuffer(
            prompt_ids,
            options.stop,
            decode,
            clock,
            is_reverified=options.is_reverified,
            num_logprobs=options.num_logprobs,
            renew_decode=renew_decode,
        )
        self._state = GenerationState(
            session_id or new_session_id(),
            options,
            tokens,
            Proposer(tokens, depth or FixedDepth(), drafter, gate),
            verifier=verifier,
            window=window,
            conditions=conditions,
            acceptance_prior=acceptance_prior,
            head_learner=learner,
            clock=clock,
        )

    def generate(self) -> Generator[SessionEvent, None, None]:
        """Yields token events, changes of unverified tokens (`MarkClearedEvent`, `RolledBackEvent`), and one
        `EndEvent`. Where it is left before, closing it ends the session.

        Raises `OutriderError` where it cannot repair, after closing; `result` has the tokens so far.
        """
        state = self._state
        state.recorder.started(state.clock.now())
        reason = FinishReason.ERROR  # unless it ends in another way
        try:
            yield from self._run()
            reason = state.tokens.finish or FinishReason.ERROR
        except CancelledByUser:
            reason = FinishReason.CANCELLED
            state.cancelled()
        except GeneratorExit:
            reason = FinishReason.CANCELLED
            raise
        finally:
            held = state.tokens.end(reason)
            self._close()
        yield EndEvent(reason, held)

    def cancel(self) -> None:
        """Ends the generation soon; its tokens so far stay. Safe in a signal handler and other threads."""
        self._is_cancelled = True
        if self._state.verifier is not None:
            self._state.verifier.cancel()

    @property
    def result(self) -> SessionResult:
        """Returns what was generated so far."""
        tokens = self._state.tokens
        return SessionResult(
            text=tokens.shown,
            token_ids=tokens.new_token_ids,
            origins=tuple(tokens.origins),
            is_verified=tuple(tokens.is_verified),
            finish_reason=tokens.finish or FinishReason.ERROR,
            model=self._state.model,
            stats=self._state.recorder.stats,
            logprobs=tuple(tokens.logprobs),
            method=self._state.options.method,
        )

    @property
    def has_draft_read(self) -> bool:
        """Returns whether the draft has read the prompt."""
        drafter = self._state.proposer.drafter
        return drafter is not None and drafter.has_read

    @property
    def way(self) -> str:
        """Returns how the next tokens are made: synchronous, pipelined, cloud-only, co-located, or alone. Safe
        in other threads."""
        state, mode = self._state, self._state.options.mode
        if state.verifier is None or not state.verifier.is_link_up:
            return "alone"
        if not mode.has_draft:
            return str(mode)
        if state.is_to_stream:
            return str(ExecutionMode.CLOUD_ONLY)
        return "pipelined" if state.window.size > 1 else "synchronous"

    @property
    def deadline_s(self) -> float | None:
        """Returns the present deadline of an ordinary round; None without a verifier."""
        verifier = self._state.verifier
        return verifier.deadline.seconds if verifier is not None else None

    # --------------------------------------------------------------------------------------- modes

    def _run(self) -> Iterator[SessionEvent]:
        mode = self._state.options.mode
        if mode is not ExecutionMode.AUTO:
            self._state.note_mode()
        if mode is ExecutionMode.EDGE_ONLY:
            yield from self._edge_only()
            return
        yield from self._open()
        if mode is ExecutionMode.AUTO:
            yield from run_auto(self._state)
        elif mode.has_draft:
            self._state.window.choose(self._state.tokens.num_remaining)
            yield from SpeculativeLoop(self._state).run()
        else:
            yield from stream_cloud_only(self._state)

    def _open(self) -> Iterator[SessionEvent]:
        """Opens the session. Only `edge_only` continues without, with the draft's end-of-sequence ids."""
        may_go_alone = self._state.options.on_timeout is OnTimeout.EDGE_ONLY and self._draft is not None
        try:
            self._state.remote.connect(_ALONE_AFTER_S if may_go_alone else math.inf)
            yield from open_session(self._state)
        except LinkError:
            if not may_go_alone or not self._state.options.mode.has_draft:
                raise
            assert self._draft is not None
            self._state.tokens.set_eos(self._draft.eos_token_ids)
            self._state.remote.mark_suspect()
            yield from continue_alone(self._state)

    def _edge_only(self) -> Iterator[SessionEvent]:
        """Generates with the draft alone, whose end-of-sequence token ends the sequence. Raises `GrammarLimitError`
        where its grammar takes too much."""
        state = self._state
        assert self._draft is not None, "edge-only needs a draft"
        state.tokens.set_eos(self._draft.eos_token_ids)
        while state.tokens.finish is None:
            if self._is_cancelled:
                raise CancelledByUser
            draft = state.proposer.write_alone(max(1, state.num_to_draft()))
            if not draft.token_ids:
                state.proposer.check_grammar()
                state.finish(FinishReason.CONTEXT)
            yield from state.add(draft.token_ids, (Origin.EDGE_ONLY,) * len(draft.token_ids))

    def _close(self) -> None:
        """Keeps what later sessions use, then frees the draft's sequence and the verifier's, whatever fails."""
        state = self._state
        try:
            self._keep()
        finally:
            if state.proposer.drafter is not None:
                state.proposer.drafter.close()
            if state.verifier is not None:
                state.verifier.close(is_cancelled=state.tokens.finish is FinishReason.CANCELLED)
                state.recorder.closed(state.verifier)

    def _keep(self) -> None:
        state = self._state
        state.remember()
        if state.proposer.drafter is not None:
            state.proposer.drafter.remember(state.tokens.chain.token_ids)
        if state.head_learner is not None:
            state.head_learner.ended()
