"""Generating alone when a round was not answered in time: the policies of `--on-timeout`.

A token that would end the sequence is never kept: only the target may end it. Where the draft proposes one,
the edge keeps what comes before it and waits for the link, at most `--recover-timeout-s`. A sequence that ended
with tokens still to be judged (`--reverify`) waits as long for their verdict.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import Draft, Origin, TokenIds
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.generation_state import GenerationState

_STALLED_SLEEP_S = 0.05


def fall_back(state: GenerationState, draft: Draft, error: RoundTimeoutError) -> Iterator[SessionEvent]:
    """Keeps tokens of `draft` unverified. Raises `error` under `fail` (and `wait`, for which the remote
    verifier has waited already)."""
    if state.tokens.finish is not None:
        state.missed_reverification()
        return
    policy = state.options.on_timeout
    if policy in (OnTimeout.WAIT, OnTimeout.FAIL):
        raise error
    if not draft.token_ids:  # a round may draft nothing, for the last token wanted for example
        draft = state.proposer.write_alone(1)
    if policy is OnTimeout.FIRST_TOKEN:
        kept = keep_unverified(state, draft.token_ids[:1], Origin.FALLBACK)
    else:
        kept = keep_unverified(state, draft.token_ids, Origin.EDGE_ONLY)
    if not kept:
        _check_stall(state)
    yield from kept
    if policy is OnTimeout.EDGE_ONLY:
        yield from continue_alone(state)


def keep_unverified(state: GenerationState, token_ids: TokenIds, origin: Origin) -> list[TokenEvent]:
    """Appends draft tokens unverified, up to one that would end the sequence or that its grammar excludes."""
    kept = state.proposer.obeying(state.tokens.until_stop(token_ids))[: state.context_room]
    return state.add(kept, (origin,) * len(kept))


def _check_stall(state: GenerationState) -> None:
    """Raises `LinkError` when nothing could be kept and the verifier was silent for too long."""
    silent_for_s = state.remote.silent_for_s
    if silent_for_s > state.options.recover_timeout_s:
        raise LinkError(
            f"{state.remote.address} has not answered for {silent_for_s:.0f} s, and the draft has reached an end of "
            "text that only the target may decide, or the end of its own context",
            "raise --recover-timeout-s or restore the link",
        )


def continue_alone(state: GenerationState) -> Iterator[SessionEvent]:
    """Drafts at the edge's own speed until the link seems to work again."""
    while state.tokens.finish is None and state.context_room and not state.remote.poll_recovery():
        draft = state.proposer.write_alone(state.num_to_draft() or 1)
        kept = keep_unverified(state, draft.token_ids, Origin.EDGE_ONLY)
        if not kept:
            _check_stall(state)
            state.remote.sleep(_STALLED_SLEEP_S)
        yield from kept
