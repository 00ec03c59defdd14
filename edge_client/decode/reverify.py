"""`--reverify`: what the edge kept unverified is judged once the link is back.

The kept tokens travel as the *draft* of the next round, not as tokens committed by the edge. Its verdict says
which of them the target would have chosen itself: their marks go. At the first that it would not, the text is
taken back and goes on with the target's own token. With `coupled`, which needs no probability of a drafted
token, the text is cloud-only's in the end, whatever was kept meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.common.alignment import extend_hash
from outrider.common.errors import OutriderError
from outrider.common.types import TokenIds, TokenLogprobs, Verdict, VerifyRequest
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)
from outrider.edge_client.decode.verdicts import tokens_of
from outrider.edge_client.gate.gate import GateUse

if TYPE_CHECKING:
    from outrider.edge_client.decode.generation_state import Decoding


def kept_for_round(decoding: Decoding) -> TokenIds:
    """The kept tokens that the next round takes as the first of its draft. One behind them must fit into the
    context; where the last of them does not, the round's bonus is held against it."""
    if not decoding.is_owed:
        return ()
    text, model = decoding.text, decoding.model
    kept = text.to_judge
    if model is None:
        return kept
    room = model.limits.max_context - 1 - text.settled_position
    return kept[: max(0, min(model.limits.max_draft_tokens, room))]


def num_behind(decoding: Decoding, num_kept: int, num_draft_tokens: int) -> int:
    """How many tokens to draft behind kept ones in one round. Those of a lost link are as likely to fall as
    drafted ones, and take their places; those of the commit-gate only await the next block it escalates."""
    if not num_kept:
        return num_draft_tokens
    gate = decoding.proposer.gate
    if gate is None or gate.use is not GateUse.COMMIT or decoding.model is None:
        return max(0, num_draft_tokens - num_kept)
    return max(0, min(num_draft_tokens, decoding.model.limits.max_draft_tokens - num_kept))


def hold_against(
    decoding: Decoding, start: int, theirs: TokenIds, logprobs: Sequence[TokenLogprobs] = ()
) -> list[SessionEvent]:
    """Holds the text against `theirs`, the target's own tokens from `start` on; `logprobs` are those of the
    first. Afterwards no token that was to be judged differs from them. (One that stands already may, after a
    late verdict: in another batch the same logits can differ in their last bits.)"""
    text, stats = decoding.text, decoding.stats
    num_alike = text.num_alike(start, theirs)
    events: list[SessionEvent] = [*text.confirm(start, num_alike, logprobs)]
    stats.num_reverified_tokens += len(events)
    position = start + num_alike
    if num_alike < len(theirs) and text.settled_position <= position < text.position:
        stats.num_rolled_back_tokens += text.position - position
        events.append(text.roll_back(position))
        del stats.token_times_ns[position - text.num_prompt_tokens :]
        if decoding.proposer.drafter is not None:
            decoding.proposer.drafter.roll_back(position)
    return events


def take_late_verdict(decoding: Decoding, request: VerifyRequest, verdict: Verdict) -> list[SessionEvent]:
    """A verdict after its deadline. Marks go from our tokens as far as the target chose the same ones after
    the same text; where it did not, they stay, or (reverified) the text goes on with the target's."""
    text, stats = decoding.text, decoding.stats
    stats.num_late_verdicts += 1
    start = request.base_position + len(request.committed_tokens)
    if not text.chain.agrees(start, extend_hash(request.base_hash, request.committed_tokens)):
        return []
    theirs, origins = tokens_of(request, verdict)
    if not text.is_reverified:
        events: list[SessionEvent] = [*text.confirm(start, text.num_alike(start, theirs), verdict.logprobs)]
        stats.num_marks_cleared += len(events)
        return events
    events = hold_against(decoding, start, theirs, verdict.logprobs)
    stats.num_marks_cleared += sum(isinstance(event, MarkClearedEvent) for event in events)
    if events and isinstance(events[-1], RolledBackEvent):
        num_known = text.position - start
        events += decoding.add(theirs[num_known:], origins[num_known:], verdict.logprobs[num_known:])
    return events


def hold_back(events: Iterator[SessionEvent]) -> Iterator[SessionEvent]:
    """The same events for a reader who cannot unread: of what may yet be taken back, nothing. What nobody
    judged in the end comes at the end, marked, before an error too."""
    held: deque[TokenEvent] = deque()
    try:
        for event in events:
            match event:
                case TokenEvent():
                    held.append(event)
                case MarkClearedEvent():
                    first = held[0].index
                    judged = replace(held[event.index - first], is_verified=True, logprobs=event.logprobs)
                    held[event.index - first] = judged
                case RolledBackEvent():
                    while held and held[-1].index >= event.num_tokens:
                        held.pop()
                case EndEvent():
                    yield from held
                    yield event
                    return
            while held and held[0].is_verified:
                yield held.popleft()
    except OutriderError:
        yield from held
        raise
