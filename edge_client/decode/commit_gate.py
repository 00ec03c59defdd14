"""The commit-gate: a block that is not escalated is committed without the target. Lossy: marked and counted.

Kept tokens are sent as `committed_tokens` with the next round, as after a fallback. A token that would end
the sequence, and the last token, always come from the target.
"""

from __future__ import annotations

from outrider.common.types import Draft, Origin
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.decode.fallback import keep_unverified
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.rounds import Proposal
from outrider.edge_client.gate.gate import GateUse

# An id and its origin take at most six bytes of a message, and only half of a message is for them.
_BYTES_PER_TOKEN = 12


def keep_block(state: GenerationState, proposal: Proposal) -> list[TokenEvent]:
    """Keeps the drafted tokens where the gate does; returns none where the verifier is to be asked."""
    gate, draft = state.proposer.gate, proposal.draft
    if gate is None or gate.use is not GateUse.COMMIT or not draft.token_ids:
        return []
    assert proposal.judgement is not None
    if proposal.judgement.is_escalated or not _may_keep(state, draft):
        return []
    state.remote.check_cancelled()  # nothing else here waits or checks
    events = keep_unverified(state, draft.token_ids, Origin.GATE)
    state.recorder.kept(proposal)
    return events


def _may_keep(state: GenerationState, draft: Draft) -> bool:
    """Returns False where a token would end the sequence, or the next request would become too large."""
    tokens, model = state.tokens, state.model
    if len(tokens.until_stop(draft.token_ids)) < len(draft.token_ids):
        return False
    assert model is not None, "a round before an opening"
    num_unacked = tokens.position - tokens.acked_position + len(draft.token_ids)
    return num_unacked * _BYTES_PER_TOKEN <= model.limits.max_message_bytes
