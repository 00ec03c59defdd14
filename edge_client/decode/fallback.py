"""What the edge does by itself when a round got no answer in time: the policies of `--on-timeout`.

A token that would end the text is never kept: only the target may say that a text is over. Where the draft
proposes one the edge keeps what lies before it and waits for the link, at most `--recover-timeout`. A text
that ended with tokens still to be judged (`--reverify`) waits as long for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from outrider.common.errors import LinkError, RoundTimeoutError
from outrider.common.types import Draft, Origin, TokenIds
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.decode.generation_state import Decoding

log = logging.getLogger(__name__)

_STALLED_SLEEP_S = 0.05


def fall_back(decoding: Decoding, draft: Draft, error: RoundTimeoutError) -> Iterator[SessionEvent]:
    """Raises `error` under `fail` (and `wait`, whose patience is in the remote verifier)."""
    if decoding.text.finish is not None:
        await_judgement(decoding)
        return
    policy = decoding.options.on_timeout
    if policy in (OnTimeout.WAIT, OnTimeout.FAIL):
        raise error
    if not draft.token_ids:  # a round may draft nothing: the last token wanted, say
        draft, _ = decoding.proposer.propose(1)
    if policy is OnTimeout.FIRST_TOKEN:
        kept = keep(decoding, draft.token_ids[:1], Origin.FALLBACK)
    else:
        kept = keep(decoding, draft.token_ids, Origin.EDGE_ONLY)
    if not kept:
        check_stall(decoding)
    yield from kept
    if policy is OnTimeout.EDGE_ONLY:
        yield from go_alone(decoding)


def keep(decoding: Decoding, token_ids: TokenIds, origin: Origin) -> list[TokenEvent]:
    """Takes draft tokens into the text unverified, up to one that would end it."""
    kept = decoding.text.until_stop(token_ids)[: decoding.context_room]
    return decoding.add(kept, (origin,) * len(kept))


def check_stall(decoding: Decoding) -> None:
    """Raises `LinkError` when nothing could be kept and the verifier was silent for too long."""
    silent_for_s = decoding.remote.lifeline.silent_for_s
    if silent_for_s > decoding.options.recover_timeout_s:
        address = decoding.remote.lifeline.address
        raise LinkError(f"{address} is silent for {silent_for_s:.0f} s, and only it may end the text")


def await_judgement(decoding: Decoding) -> None:
    """Nothing is left to do but to ask again, for `recover_timeout_s` of silence since the text ended."""
    lifeline, now_s = decoding.remote.lifeline, decoding.remote.lifeline.now_s
    if decoding.ended_s is None:
        decoding.ended_s = now_s
    silent_for_s = min(lifeline.silent_for_s, now_s - decoding.ended_s)
    if silent_for_s > decoding.options.recover_timeout_s:
        num_left = len(decoding.text.to_judge)
        log.warning("%d tokens stay unverified: silent for %.0f s", num_left, silent_for_s)
        decoding.has_given_up = True


def go_alone(decoding: Decoding) -> Iterator[SessionEvent]:
    """Drafts at the edge's own speed until the link shows a sign of life."""
    while decoding.text.finish is None and decoding.context_room and not decoding.remote.is_back():
        num_draft_tokens = decoding.num_to_draft() or 1
        draft, _ = decoding.proposer.propose(num_draft_tokens)
        kept = keep(decoding, draft.token_ids, Origin.EDGE_ONLY)
        if not kept:
            check_stall(decoding)
            decoding.remote.lifeline.sleep(_STALLED_SLEEP_S)
        yield from kept
