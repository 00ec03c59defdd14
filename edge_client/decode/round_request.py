"""Making a round: its draft, then its request."""

from __future__ import annotations

from collections.abc import Callable

from outrider.common.methods import sends_probs, sends_support
from outrider.common.types import Draft, VerifyRequest
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.reverify import kept_for_round, num_after_kept
from outrider.edge_client.decode.rounds import Proposal, Round, assumed_tokens, tokens_of_branch


def propose_round(
    state: GenerationState, branch: Branch[Round] | None, is_invalidated: Callable[[], bool] | None
) -> Proposal:
    """Drafts a round on `branch`, until `is_invalidated`; None: after the sequence, with nothing in flight."""
    started_s = state.clock.now()
    assumed, kept = assumed_tokens(branch, state.tokens), kept_for_round(state)
    depth = state.num_to_draft(len(assumed)) if state.pending is None else 0
    num_wanted = num_after_kept(state, len(kept), depth)
    draft, draft_ms = state.proposer.propose(num_wanted, assumed, is_invalidated, is_gated=True)
    return Proposal(draft, draft_ms, branch, assumed, kept, num_wanted, started_s)


def make_request(state: GenerationState, proposal: Proposal, drafted_s: float) -> VerifyRequest:
    """Returns the request of a round. Signals and probabilities are known of drafted tokens, not of kept
    ones: with kept tokens none are sent."""
    tokens, method, pending = state.tokens, state.options.method, state.pending
    draft, judgement, kept = proposal.draft, proposal.judgement, proposal.kept
    if (branch := proposal.branch) is None:
        base_position, base_hash = tokens.acked_position, tokens.acked_hash
        committed, origins = tokens.unacked()
    else:
        before = tokens_of_branch(branch)
        base_position, base_hash = branch.host.start + len(before), branch.host.hash_after(before)
        committed, origins = (), ()
    return VerifyRequest(
        round_id=state.remote.next_round_id(),
        base_position=base_position,
        base_hash=base_hash,
        committed_tokens=committed,
        origins=origins,
        draft_tokens=(*kept, *draft.token_ids),
        q_token_probs=draft.draft_probs if sends_probs(method) and not kept else (),
        hard_mask=b"" if judgement is None or kept else judgement.hard_mask,
        q_support=draft.supports if sends_support(method) else (),
        candidates_from=pending.num_seen if pending is not None else 0,
        pipelined=state.window.size > 1 and _may_continue(state, draft, len(proposal.assumed)),
        deadline_ms=state.remote.deadline_ms(drafted_s),
    )


def _may_continue(state: GenerationState, draft: Draft, num_assumed: int) -> bool:
    """Returns whether another round may follow this one before its verdict. A token that the gate doubted is
    waited for."""
    if draft.doubted is not None or not draft.token_ids or state.has_pending_reverification:
        return False
    if len(state.tokens.until_stop(draft.token_ids)) < len(draft.token_ids):
        return False
    return state.num_to_draft(num_assumed + len(draft.token_ids)) > 0
