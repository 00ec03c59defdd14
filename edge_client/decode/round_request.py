"""What is sent for a round: where it builds, what comes before the draft, whether more follows. Pure."""

from __future__ import annotations

from outrider.common.methods import sends_probs, sends_support
from outrider.common.types import Draft, TokenIds, VerifyRequest
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.rounds import Round, tokens_of_branch
from outrider.edge_client.gate.gate import Judgement


def make_request(
    decoding: Decoding,
    draft: Draft,
    drafted_s: float,
    branch: Branch[Round] | None,
    num_assumed: int,
    judgement: Judgement | None,
    to_judge: TokenIds,
) -> VerifyRequest:
    """Behind the text, or on `branch`, which assumes `num_assumed` tokens behind it. Tokens `to_judge` come
    before the draft; what may be told of each drafted token is not known of them, and need not be told."""
    text, method, pending = decoding.text, decoding.options.method, decoding.pending
    base_position, base_hash = text.acked_position, text.acked_hash
    committed, origins = text.unacked()
    if branch is not None:
        before = tokens_of_branch(branch)
        base_position, base_hash = branch.host.start + len(before), branch.host.hash_after(before)
        committed, origins = (), ()
    return VerifyRequest(
        round_id=decoding.remote.next_round_id(),
        base_position=base_position,
        base_hash=base_hash,
        committed_tokens=committed,
        origins=origins,
        draft_tokens=(*to_judge, *draft.token_ids),
        q_token_probs=draft.draft_probs if sends_probs(method) and not to_judge else (),
        hard_mask=b"" if judgement is None or to_judge else judgement.hard_mask,
        q_support=draft.supports if sends_support(method) else (),
        candidates_from=pending.num_seen if pending is not None else 0,
        pipelined=decoding.window.size > 1 and _has_more_behind(decoding, draft, num_assumed),
        deadline_ms=decoding.remote.deadline_ms(drafted_s),
    )


def _has_more_behind(decoding: Decoding, draft: Draft, num_assumed: int) -> bool:
    """Whether another round may follow this one before its verdict. What was doubted is waited for."""
    if draft.doubted is not None or not draft.token_ids or decoding.is_owed:
        return False
    if len(decoding.text.until_stop(draft.token_ids)) < len(draft.token_ids):
        return False
    return decoding.num_to_draft(num_assumed + len(draft.token_ids)) > 0
