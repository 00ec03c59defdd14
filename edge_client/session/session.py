"""One generation, from a prompt to its last token: `EdgeSession.generate()` yields events.

The loops live in `speculative`, `cloud_only` and here (edge-only); this class opens, closes, and keeps the
result whatever happens.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.common.errors import LinkError
from outrider.common.methods import num_support
from outrider.common.types import FinishReason, Method, ModelInfo, Origin, TokenIds, TokenLogprobs
from outrider.edge_client.controller.acceptance_prior import Experience
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import EndEvent, SessionEvent
from outrider.edge_client.core.options import Mode, OnTimeout, SessionOptions
from outrider.edge_client.core.stats import SessionStats
from outrider.edge_client.decode.auto import run_auto
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.fallback import go_alone
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.decode.proposer import Proposer
from outrider.edge_client.decode.speculative import SpeculativeLoop
from outrider.edge_client.decode.token_buffer import Decode, SessionText
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.gate.gate import Gate
from outrider.edge_client.transport.connection import CancelledByUser
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

_ALONE_AFTER_S = 1.0  # without a first connection, where the edge may begin by itself


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What was generated; also after an error or a cancel, as far as it came."""

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
        """Of each new token: whether an approximate method let it in."""
        is_approximate = not self.method.is_exact
        return tuple(is_approximate and origin.is_judged for origin in self.origins)

    @property
    def num_unverified_tokens(self) -> int:
        return self.is_verified.count(False)


def new_session_id() -> bytes:
    return secrets.token_bytes(16)


def _create_drafter(
    draft: DraftModel, options: SessionOptions, num_prompt_tokens: int, min_draft_s: float
) -> Drafter:
    """Alone, the draft samples from all of its distribution: nobody judges it by a support."""
    is_alone = options.mode is Mode.EDGE_ONLY
    num_ids = 0 if is_alone else num_support(options.method, options.support_size)
    return Drafter(draft, options.sampling, num_prompt_tokens, num_ids, min_draft_s)


class EdgeSession:
    """Generates once. `verifier` is None in edge-only mode, `draft` in cloud-only and co-located mode.

    `decode` turns an id into the text that became final with it; `renew_decode` makes another that has seen
    the prompt alone, which a text that is taken back needs (None: `decode` has no state). `experience` is
    shared with other sessions of the same draft. The session closes `verifier`; `draft` stays its owner's.
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
        gate: Gate | None = None,
        experience: Experience | None = None,
        session_id: bytes | None = None,
        min_draft_s: float = 0.0,
    ) -> None:
        assert prompt_ids, "an empty prompt"
        self._draft = draft
        self._is_cancelled = False
        drafter = _create_drafter(draft, options, len(prompt_ids), min_draft_s) if draft else None
        text = SessionText(
            prompt_ids, options.stop, decode, is_reverified=options.is_reverified, renew_decode=renew_decode
        )
        self._decoding = Decoding(
            session_id=session_id or new_session_id(),
            options=options,
            text=text,
            proposer=Proposer(text, depth or FixedDepth(), drafter, gate),
            window=window or RoundWindow(),
            experience=experience,
            stats=SessionStats(),
            verifier=verifier,
        )

    def generate(self) -> Iterator[SessionEvent]:
        """Yields token events, what becomes of unverified ones (`MarkClearedEvent`, `RolledBackEvent`), and
        one `EndEvent`.

        Raises what cannot be repaired (`OutriderError`) after closing; `result` holds the partial text.
        """
        text = self._decoding.text
        self._decoding.stats.start_ns = time.perf_counter_ns()
        reason = FinishReason.ERROR  # unless it ends in another way
        try:
            yield from self._run()
            reason = text.finish or FinishReason.ERROR
        except CancelledByUser:
            reason = FinishReason.CANCELLED
            if self._decoding.is_owed:
                text.finish = None  # it had ended unless the target disagreed, which nobody waits to hear
        except GeneratorExit:
            reason = FinishReason.CANCELLED
            raise
        finally:
            held = text.end(reason)
            self._close()
        yield EndEvent(reason, held)

    def cancel(self) -> None:
        """Ends the generation soon; its text so far stays. Safe in a signal handler and other threads."""
        self._is_cancelled = True
        if self._decoding.verifier is not None:
            self._decoding.verifier.lifeline.cancel()

    @property
    def result(self) -> SessionResult:
        text = self._decoding.text
        return SessionResult(
            text=text.shown,
            token_ids=text.new_token_ids,
            origins=tuple(text.origins),
            is_verified=tuple(text.is_verified),
            finish_reason=text.finish or FinishReason.ERROR,
            model=self._decoding.model,
            stats=self._decoding.stats,
            logprobs=tuple(text.logprobs),
            method=self._decoding.options.method,
        )

    @property
    def way(self) -> str:
        """How the next tokens come about: synchronous, pipelined, cloud-only, co-located, or alone. For
        watching; safe in other threads."""
        decoding, mode = self._decoding, self._decoding.options.mode
        if decoding.verifier is None or not decoding.verifier.lifeline.breaker.is_closed:
            return "alone"
        if not mode.has_draft:
            return str(mode)
        if decoding.is_to_stream:
            return str(Mode.CLOUD_ONLY)
        return "pipelined" if decoding.window.size > 1 else "synchronous"

    @property
    def deadline_s(self) -> float | None:
        """Of an ordinary round, now; None without a verifier."""
        verifier = self._decoding.verifier
        return verifier.deadline.seconds if verifier is not None else None

    # --------------------------------------------------------------------------------------- modes

    def _run(self) -> Iterator[SessionEvent]:
        mode = self._decoding.options.mode
        if mode is Mode.EDGE_ONLY:
            yield from self._edge_only()
            return
        yield from self._open()
        if mode is Mode.AUTO:
            yield from run_auto(self._decoding)
        elif mode.has_draft:
            yield from SpeculativeLoop(self._decoding).run()
        else:
            yield from stream_cloud_only(self._decoding)

    def _open(self) -> Iterator[SessionEvent]:
        """The first contact. Only `edge_only` goes on without one, on the draft's word for the tokenizer."""
        may_go_alone = self._decoding.options.on_timeout is OnTimeout.EDGE_ONLY and self._draft is not None
        try:
            self._decoding.remote.connect(_ALONE_AFTER_S if may_go_alone else math.inf)
            yield from open_session(self._decoding)
        except LinkError:
            if not may_go_alone or not self._decoding.options.mode.has_draft:
                raise
            assert self._draft is not None
            self._decoding.text.set_eos(self._draft.eos_token_ids)
            self._decoding.remote.lifeline.suspect()
            yield from go_alone(self._decoding)

    def _edge_only(self) -> Iterator[SessionEvent]:
        """The draft is the only model here, so its end-of-text ends the text."""
        decoding = self._decoding
        assert self._draft is not None, "edge-only needs a draft"
        decoding.text.set_eos(self._draft.eos_token_ids)
        while decoding.text.finish is None:
            if self._is_cancelled:
                raise CancelledByUser
            draft, _ = decoding.proposer.propose(max(1, decoding.num_to_draft()))
            if not draft.token_ids:
                decoding.text.finish = FinishReason.CONTEXT
            yield from decoding.add(draft.token_ids, (Origin.EDGE_ONLY,) * len(draft.token_ids))

    def _close(self) -> None:
        decoding = self._decoding
        decoding.remember()
        if decoding.proposer.drafter is not None:
            decoding.proposer.drafter.close()
        if decoding.verifier is None:
            return
        decoding.verifier.close(is_cancelled=decoding.text.finish is FinishReason.CANCELLED)
        traffic, lifeline = decoding.verifier.lifeline.traffic, decoding.verifier.lifeline
        decoding.stats.bytes_up, decoding.stats.bytes_down = traffic.bytes_up, traffic.bytes_down
        decoding.stats.num_reconnects = lifeline.num_reconnects
        decoding.stats.num_refusals = decoding.verifier.num_refusals
