"""What a verdict says of its round: the tokens it makes, whether it can be true, the record of it. Pure."""

from __future__ import annotations

from outrider.common.alignment import TokenChain, extend_hash
from outrider.common.types import (
    CorrectionKind,
    Draft,
    Origin,
    RoundError,
    RoundErrorCode,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.correction import PendingCorrection
from outrider.edge_client.decode.rounds import Round
from outrider.edge_client.transport.remote_verifier import Answer

_ORIGIN_OF = {CorrectionKind.CORRECTION: Origin.CORRECTION, CorrectionKind.BONUS: Origin.BONUS}


def tokens_of(request: VerifyRequest, verdict: Verdict) -> tuple[TokenIds, tuple[Origin, ...]]:
    """What the text has from the start of the round's draft on, by its verdict."""
    token_ids = request.draft_tokens[: verdict.accepted_len]
    origins = (Origin.ACCEPTED,) * len(token_ids)
    if verdict.correction_kind is CorrectionKind.NONE:
        return token_ids, origins
    return (*token_ids, verdict.correction), (*origins, _ORIGIN_OF[verdict.correction_kind])


def agrees(
    chain: TokenChain, settled_position: int, round_: Round, verdict: Verdict, token_ids: TokenIds
) -> bool:
    """Whether the verifier's text is ours, as far as that is settled, with `token_ids` behind where the draft
    began."""
    start = round_.start
    known = tuple(chain.token_ids[start:settled_position])
    is_known_right = token_ids[: len(known)] == known
    is_length_right = verdict.position == start + len(token_ids)
    new_ids = token_ids[len(known) :]
    if settled_position == chain.position:
        hash_ = chain.hash_with(new_ids)
    else:
        hash_ = extend_hash(chain.hash_at(settled_position), new_ids)
    return is_known_right and is_length_right and verdict.hash == hash_


def can_choose(pending: PendingCorrection | None, verdict: Verdict, draft: Draft) -> bool:
    """Whether candidates came where some are due, and only there."""
    if pending is not None:
        return bool(verdict.candidates)
    return not verdict.candidates or verdict.accepted_len < len(draft.supports)


def disagreement(verdict: Verdict) -> RoundError:
    message = "the verdict's position, hash or candidates are not those of the text it makes"
    return RoundError(verdict.round_id, RoundErrorCode.UNKNOWN_PREFIX, message)


def make_record(round_: Round, num_accepted_tokens: int, answer: Answer) -> RoundRecord:
    """Of a round whose verdict was taken. Kept tokens are no draft; where they fell, what was drafted behind
    them was not judged."""
    draft, metrics, judgement = round_.draft, answer.verdict.metrics, round_.judgement
    is_judged = answer.verdict.accepted_len >= round_.num_kept
    num_draft_tokens = len(draft.token_ids) if is_judged else 0
    return RoundRecord(
        round_id=answer.verdict.round_id,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        draft_ms=round_.draft_ms,
        rtt_ms=answer.wait_s * 1e3,
        net_ms=answer.wait_s * 1e3 - metrics.total_ns / 1e6,
        queue_ms=metrics.queue_ns / 1e6,
        forward_ms=metrics.forward_ns / 1e6,
        verifier_ms=metrics.total_ns / 1e6,
        batch_size=metrics.batch_size,
        alpha_mean=metrics.alpha_mean,
        bytes_up=answer.bytes_up,
        bytes_down=answer.bytes_down,
        confidences=draft.confidences if is_judged else (),
        window=round_.window,
        pipelined_hit=True if round_.is_ahead else None,
        is_guess_hit=round_.is_guess_hit,
        num_dropped_tokens=int(draft.doubted is not None),
        hard_ratio=None if judgement is None else judgement.hard_ratio,
        escalated=None if judgement is None else judgement.is_escalated,
    )


def make_stale_record(round_: Round, *, is_first_wrong: bool) -> RoundRecord:
    """Of a round whose assumption fell. `is_first_wrong`: with its first token, a bonus guessed wrong."""
    return RoundRecord(
        round_.request.round_id,
        len(round_.draft.token_ids),
        draft_ms=round_.draft_ms,
        is_answered=False,
        window=round_.window,
        pipelined_hit=None if round_.is_guess else False,
        is_first_wrong=is_first_wrong,
    )
