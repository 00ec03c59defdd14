"""`--reverify`: tokens that the edge kept unverified are judged once the link is back.

The kept tokens travel as the *draft* of the next round, not as tokens committed by the edge. Its verdict has
those that the target would have chosen itself: their marks are cleared. At the first other one the sequence
is rolled back and continues with the target's token. With `coupled`, which needs no probability of a drafted
token, the sequence is cloud-only's in the end, whatever was kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.types import TokenIds, TokenLogprobs
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.gate.gate import GateUse


def kept_for_round(state: GenerationState) -> TokenIds:
    """Returns the kept tokens that the next round takes as the first of its draft. One token after them must
    fit into the context; where the last of them does not, the round's bonus is compared with it."""
    if not state.has_pending_reverification:
        return ()
    tokens, model = state.tokens, state.model
    kept = tokens.to_judge
    if model is None:
        return kept
    room = model.limits.max_context - 1 - tokens.settled_position
    return kept[: max(0, min(model.limits.max_draft_tokens, room))]


def num_after_kept(state: GenerationState, num_kept: int, num_draft_tokens: int) -> int:
    """Returns how many tokens to draft after kept ones in one round. Those of a lost link are as likely to be
    rejected as drafted ones, and take their places; those of the commit-gate only await the next block that
    it escalates."""
    if not num_kept:
        return num_draft_tokens
    gate = state.proposer.gate
    if gate is None or gate.use is not GateUse.COMMIT or state.model is None:
        return max(0, num_draft_tokens - num_kept)
    return max(0, min(num_draft_tokens, state.model.limits.max_draft_tokens - num_kept))


def reconcile(
    state: GenerationState, start: int, theirs: TokenIds, logprobs: Sequence[TokenLogprobs] = ()
) -> list[SessionEvent]:
    """Compares the sequence with `theirs`, the target's own tokens from `start` on: clears marks up to the
    first difference, and rolls back from there where tokens are still to be judged. `logprobs` are those of
    the first ones. (A settled token may differ after a late verdict: in another batch the same logits can
    differ in their last bits.)"""
    tokens = state.tokens
    num_alike = tokens.num_alike(start, theirs)
    events: list[SessionEvent] = [*tokens.confirm(start, num_alike, logprobs)]
    state.recorder.reverified(len(events))
    position = start + num_alike
    if num_alike < len(theirs) and tokens.settled_position <= position < tokens.position:
        events.append(state.roll_back(position))
    return events
