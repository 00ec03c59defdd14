"""The commit-gate: a block that is not escalated joins the text without asking. Lossy: marked and counted.

What is kept goes along as `committed_tokens` with the next round that asks, as after a fallback. Whatever
would end the text by a token, and the text's last token, are always the target's.
"""

from __future__ import annotations

from outrider.common.types import Draft, Origin
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.fallback import keep
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.gate.gate import GateUse, Judgement

# An id and its origin take six bytes of a message at most; half of it is for them.
_BYTES_PER_TOKEN = 12


def keep_block(
    decoding: Decoding, draft: Draft, draft_ms: float, judgement: Judgement | None
) -> list[TokenEvent]:
    """Its tokens, where the gate keeps them; none where the verifier is to be asked."""
    gate = decoding.proposer.gate
    if gate is None or gate.use is not GateUse.COMMIT or not draft.token_ids:
        return []
    assert judgement is not None
    if judgement.is_escalated or not _may_keep(decoding, draft):
        return []
    decoding.remote.lifeline.check_cancelled()  # nothing else here waits, or looks
    events = keep(decoding, draft.token_ids, Origin.GATE)
    decoding.record(
        RoundRecord(
            0,
            len(draft.token_ids),
            draft_ms=draft_ms,
            is_answered=False,
            is_kept=True,
            hard_ratio=judgement.hard_ratio,
            escalated=False,
        )
    )
    return events


def _may_keep(decoding: Decoding, draft: Draft) -> bool:
    """Not where a token would end the text, nor more than the next request can carry."""
    text, model = decoding.text, decoding.model
    if len(text.until_stop(draft.token_ids)) < len(draft.token_ids):
        return False
    assert model is not None, "a round before an opening"
    num_unacked = text.position - text.acked_position + len(draft.token_ids)
    return num_unacked * _BYTES_PER_TOKEN <= model.limits.max_message_bytes
