"""Applying a verdict: is it consistent with the edge's sequence, and which tokens does it add?"""

from __future__ import annotations

from outrider.common.alignment import extend_hash
from outrider.common.tree import tokens_on_path
from outrider.common.types import (
    CorrectionKind,
    FinishReason,
    Origin,
    RoundError,
    RoundErrorCode,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, SessionEvent
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.reverify import reconcile
from outrider.edge_client.decode.rounds import Round
from outrider.edge_client.transport.remote_verifier import Answer

_ORIGIN_OF = {CorrectionKind.CORRECTION: Origin.CORRECTION, CorrectionKind.BONUS: Origin.BONUS}


def apply_verdict(state: GenerationState, round_: Round, answer: Answer) -> list[SessionEvent] | None:
    """Appends what the verdict brings. Returns None, and has the session opened again, where the verdict is
    that of another sequence."""
    tokens, verdict = state.tokens, answer.verdict
    token_ids, origins = tokens_of(round_.request, verdict)
    if not _is_consistent(state, round_, verdict, token_ids):
        state.failed(_disagreement(verdict))
        state.lost()
        return None
    state.answered()
    events: list[SessionEvent] = []
    if tokens.position > round_.start:  # kept tokens, or the bonus of the round before, drafted right
        events += reconcile(state, round_.start, token_ids, verdict.logprobs)
    num_known = tokens.position - round_.start
    added = state.add(token_ids[num_known:], origins[num_known:], verdict.logprobs[num_known:])
    events += added
    state.learn(round_.start, verdict.logprobs)
    tokens.acknowledge(verdict.position)
    num_accepted = max(0, min(num_known, verdict.accepted_len) - round_.num_kept)
    num_accepted += sum(event.origin is Origin.ACCEPTED for event in added)
    state.recorder.judged(round_, num_accepted, answer)
    if tokens.finish is None:
        if verdict.candidates:
            supports = round_.draft.supports
            support = supports[verdict.accepted_len] if state.pending is None else None
            events += state.choose_correction(support, verdict.candidates)
        elif not token_ids and not round_.request.pipelined:  # the verifier has nothing more to say
            state.finish(FinishReason.STOP)
    return events


def apply_late_verdict(
    state: GenerationState, request: VerifyRequest, verdict: Verdict
) -> list[SessionEvent]:
    """Applies a verdict that came after its deadline. Clears the marks of the edge's tokens as far as the
    target chose the same ones after the same sequence; the others keep them or (`--reverify`) are replaced."""
    tokens = state.tokens
    start = request.base_position + len(request.committed_tokens)
    events: list[SessionEvent] = []
    if tokens.chain.agrees(start, extend_hash(request.base_hash, request.committed_tokens)):
        theirs, origins = tokens_of(request, verdict)
        if tokens.is_reverified:
            events += reconcile(state, start, theirs, verdict.logprobs)
            if events and isinstance(events[-1], RolledBackEvent):
                num_known = tokens.position - start
                events += state.add(theirs[num_known:], origins[num_known:], verdict.logprobs[num_known:])
        else:
            events += tokens.confirm(start, tokens.num_alike(start, theirs), verdict.logprobs)
    state.recorder.late_verdict(sum(isinstance(event, MarkClearedEvent) for event in events))
    return events


def tokens_of(request: VerifyRequest, verdict: Verdict) -> tuple[TokenIds, tuple[Origin, ...]]:
    """Returns the tokens, with their origins, that the verdict puts from the start of the round's draft on.

    Nodes that are no path of the round's tree bring none: the verdict then disagrees with the sequence.
    """
    if not request.parents:
        token_ids = request.draft_tokens[: verdict.accepted_len]
    else:
        token_ids = tokens_on_path(request.draft_tokens, request.parents, verdict.accepted_nodes)
    origins = (Origin.ACCEPTED,) * len(token_ids)
    if verdict.correction_kind is CorrectionKind.NONE:
        return token_ids, origins
    return (*token_ids, verdict.correction), (*origins, _ORIGIN_OF[verdict.correction_kind])


def _is_consistent(state: GenerationState, round_: Round, verdict: Verdict, token_ids: TokenIds) -> bool:
    """Returns whether the verdict's position, hash and candidates are those of the settled sequence followed
    by what `token_ids`, which begin at the round's draft, add to it."""
    chain, settled_position = state.tokens.chain, state.tokens.settled_position
    known = tuple(chain.token_ids[round_.start : settled_position])
    if token_ids[: len(known)] != known or verdict.position != round_.start + len(token_ids):
        return False
    new_ids = token_ids[len(known) :]
    if settled_position == chain.position:
        hash_ = chain.hash_with(new_ids)
    else:
        hash_ = extend_hash(chain.hash_at(settled_position), new_ids)
    return verdict.hash == hash_ and _has_right_candidates(state, round_, verdict)


def _has_right_candidates(state: GenerationState, round_: Round, verdict: Verdict) -> bool:
    """Returns whether candidates came where a correction is to be chosen, and only there."""
    if state.pending is not None:
        return bool(verdict.candidates)
    return not verdict.candidates or verdict.accepted_len < len(round_.draft.supports)


def _disagreement(verdict: Verdict) -> RoundError:
    message = "the verdict's position, hash or candidates do not match the edge's sequence"
    return RoundError(verdict.round_id, RoundErrorCode.UNKNOWN_PREFIX, message)
