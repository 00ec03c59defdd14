"""The main loop: propose, verify, take the verdict; repair or fall back when that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from common.alignment import extend_hash
from common.errors import RoundTimeoutError
from common.methods import sends_probs, sends_support
from common.types import (
    CorrectionKind,
    Draft,
    FinishReason,
    Origin,
    RoundError,
    RoundErrorCode,
    Verdict,
    VerifyRequest,
)
from edge_client.cloud_only import stream_cloud_only
from edge_client.correction import PendingCorrection
from edge_client.events import SessionEvent, TokenEvent
from edge_client.fallback import fall_back
from edge_client.opening import open_session
from edge_client.options import Decoding
from edge_client.remote_verifier import Answer, SessionLostError, UnknownPrefixError
from edge_client.stats import RoundRecord

log = logging.getLogger(__name__)

_ORIGIN_OF = {CorrectionKind.CORRECTION: Origin.CORRECTION, CorrectionKind.BONUS: Origin.BONUS}


class SpeculativeLoop:
    """Rounds until the text ends. `run` yields events; errors nobody can repair propagate."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def run(self) -> Iterator[SessionEvent]:
        while self._decoding.text.finish is None:
            if not self._decoding.context_room:
                self._decoding.text.finish = FinishReason.CONTEXT
            elif self._decoding.must_open:
                yield from self._reopen()
            else:
                yield from self._round()
            yield from self._take_late_verdicts()

    def _reopen(self) -> Iterator[SessionEvent]:
        try:
            yield from open_session(self._decoding)
        except RoundTimeoutError as error:
            draft, draft_ms = self._decoding.propose(self._decoding.num_to_draft())
            self._count_timeout(len(draft.token_ids), draft_ms)
            yield from fall_back(self._decoding, draft, error)

    def _round(self) -> Iterator[SessionEvent]:
        decoding = self._decoding
        num_draft_tokens = decoding.num_to_draft() if decoding.pending is None else 0
        draft, draft_ms = decoding.propose(num_draft_tokens)
        if num_draft_tokens > 0 and not draft.token_ids and _is_draft_over(decoding):
            log.info("the draft's context is full: cloud-only from here")
            yield from stream_cloud_only(decoding)
            return
        request = self._make_request(draft)
        traffic = decoding.remote.lifeline.traffic
        bytes_before = traffic.bytes_up, traffic.bytes_down
        try:
            verdict, answer = decoding.remote.verify(request)
        except RoundTimeoutError as error:
            self._count_timeout(len(draft.token_ids), draft_ms)
            yield from fall_back(decoding, draft, error)
        except UnknownPrefixError as error:
            self._repair(error.error)
        except SessionLostError as error:
            self._decoding.note_failure(error.error)
            decoding.must_open = True
        else:
            num_bytes = traffic.bytes_up - bytes_before[0], traffic.bytes_down - bytes_before[1]
            yield from self._take(request, draft, draft_ms, verdict, answer, num_bytes)

    def _make_request(self, draft: Draft) -> VerifyRequest:
        text, method, pending = self._decoding.text, self._decoding.options.method, self._decoding.pending
        committed, origins = text.unacked()
        return VerifyRequest(
            round_id=self._decoding.remote.next_round_id(),
            base_position=text.acked_position,
            base_hash=text.acked_hash,
            committed_tokens=committed,
            origins=origins,
            draft_tokens=draft.token_ids,
            q_token_probs=draft.draft_probs if sends_probs(method) else (),
            q_support=draft.supports if sends_support(method) else (),
            candidates_from=pending.num_seen if pending is not None else 0,
        )

    # ------------------------------------------------------------------------------------ verdicts

    def _take(
        self,
        request: VerifyRequest,
        draft: Draft,
        draft_ms: float,
        verdict: Verdict,
        answer: Answer,
        num_bytes: tuple[int, int],
    ) -> Iterator[SessionEvent]:
        decoding = self._decoding
        token_ids = request.draft_tokens[: verdict.accepted_len]
        origins = (Origin.ACCEPTED,) * len(token_ids)
        if verdict.correction_kind is not CorrectionKind.NONE:
            token_ids, origins = (
                (*token_ids, verdict.correction),
                (*origins, _ORIGIN_OF[verdict.correction_kind]),
            )
        if not self._agrees(verdict, token_ids) or not self._can_choose(verdict, draft):
            self._decoding.note_failure(_disagreement(verdict))
            decoding.must_open = True  # whatever it has there, it is not this text
            return
        decoding.note_success()
        events = decoding.add(token_ids, origins, verdict.logprobs)
        if decoding.text.finish is None:
            decoding.text.acknowledge()
        num_accepted = sum(event.origin is Origin.ACCEPTED for event in events)
        decoding.record(_make_record(draft, num_accepted, draft_ms, verdict, answer, num_bytes))
        yield from events
        if decoding.text.finish is not None:
            return
        if verdict.candidates:
            yield from self._choose(draft, verdict)
        elif verdict.correction_kind is CorrectionKind.NONE:
            decoding.text.finish = FinishReason.STOP

    def _choose(self, draft: Draft, verdict: Verdict) -> list[TokenEvent]:
        """The correction, if one of the candidates passes. It is ours alone until the next round carries it,
        and has no log-probabilities."""
        decoding = self._decoding
        if decoding.pending is None:
            support = draft.supports[verdict.accepted_len]
            decoding.pending = PendingCorrection(decoding.text.position, support)
        token_id = decoding.pending.choose(verdict.candidates, decoding.options.sampling.seed)
        return [] if token_id is None else decoding.add((token_id,), (Origin.CORRECTION,))

    def _can_choose(self, verdict: Verdict, draft: Draft) -> bool:
        """Whether candidates came where some are due, and only there."""
        if self._decoding.pending is not None:
            return bool(verdict.candidates)
        return not verdict.candidates or verdict.accepted_len < len(draft.supports)

    def _agrees(self, verdict: Verdict, token_ids: tuple[int, ...]) -> bool:
        chain = self._decoding.text.chain
        is_length_right = verdict.position == chain.position + len(token_ids)
        return is_length_right and verdict.hash == extend_hash(chain.hash, token_ids)

    def _take_late_verdicts(self) -> Iterator[SessionEvent]:
        for request, verdict in self._decoding.remote.take_late_verdicts():
            cleared = self._decoding.text.clear_marks(request, verdict)
            self._decoding.stats.num_late_verdicts += 1
            self._decoding.stats.num_marks_cleared += len(cleared)
            yield from cleared

    # ------------------------------------------------------------------------------------- repairs

    def _repair(self, error: RoundError) -> None:
        """Goes on from where the verifier says it is, if that is our text; else opens again."""
        self._decoding.note_failure(error)
        text = self._decoding.text
        if self._decoding.pending is not None:  # candidates are asked for behind the whole text
            self._decoding.must_open = True
        elif error.position >= text.num_prompt_tokens and text.chain.agrees(error.position, error.hash):
            is_new = error.position != text.acked_position
            text.acked_position = error.position
            self._decoding.must_open = not is_new
        else:
            self._decoding.must_open = True

    def _count_timeout(self, num_draft_tokens: int, draft_ms: float) -> None:
        self._decoding.stats.num_timeouts += 1
        self._decoding.record(RoundRecord(0, num_draft_tokens, draft_ms=draft_ms, is_answered=False))


def _is_draft_over(decoding: Decoding) -> bool:
    """An empty draft is else a round like any other: a strategy may know nothing now and more later."""
    return decoding.drafter is None or decoding.drafter.is_full


def _disagreement(verdict: Verdict) -> RoundError:
    message = "the verdict's position, hash or candidates are not those of the text it makes"
    return RoundError(verdict.round_id, RoundErrorCode.UNKNOWN_PREFIX, message)


def _make_record(
    draft: Draft,
    num_accepted_tokens: int,
    draft_ms: float,
    verdict: Verdict,
    answer: Answer,
    num_bytes: tuple[int, int],
) -> RoundRecord:
    metrics = verdict.metrics
    return RoundRecord(
        round_id=verdict.round_id,
        num_draft_tokens=len(draft.token_ids),
        num_accepted_tokens=num_accepted_tokens,
        draft_ms=draft_ms,
        rtt_ms=answer.wait_s * 1e3,
        net_ms=answer.wait_s * 1e3 - metrics.total_ns / 1e6,
        queue_ms=metrics.queue_ns / 1e6,
        forward_ms=metrics.forward_ns / 1e6,
        verifier_ms=metrics.total_ns / 1e6,
        batch_size=metrics.batch_size,
        alpha_mean=metrics.alpha_mean,
        bytes_up=num_bytes[0],
        bytes_down=num_bytes[1],
        confidences=draft.confidences,
    )
