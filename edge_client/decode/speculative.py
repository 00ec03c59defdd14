"""The speculative loop: draft, send, apply the verdict; repair or fall back when that fails.

One loop, synchronous or pipelined: with a window of one round (`controller.window` sizes it) each verdict is
waited for before the next draft. With more, the edge drafts on after what it sent as if all of it were
accepted, or, where that is likelier, after a correction that it predicts (`decode.branch_tree`). Rounds whose
assumption turns out wrong are dropped at once, and the verifier answers them without computing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from outrider.common.errors import RoundTimeoutError
from outrider.common.types import Draft, Origin
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.fallback import fall_back, keep_unverified
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.decode.round_pipeline import LEAVING_S, RoundPipeline
from outrider.edge_client.decode.rounds import Proposal, Round
from outrider.edge_client.decode.verdicts import apply_late_verdict
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.transport.remote_verifier import SessionLostError, UnknownPrefixError

log = logging.getLogger(__name__)

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


class SpeculativeLoop:
    """Runs rounds until the sequence ends. `run` yields events; errors that cannot be repaired propagate."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._pipeline = RoundPipeline(state)

    def run(self) -> Iterator[SessionEvent]:
        """Runs until the sequence ends, or the target's own stream is chosen and no round is in flight."""
        while self._may_continue():
            if self._state.must_open:
                yield from self._reopen()
            elif not self._pipeline:
                yield from self._start_round(None)
            elif (branch := self._pipeline.next_branch()) is not None:
                yield from self._start_round(branch)
            else:
                yield from self._finish_round()
        self._state.recorder.observe()

    def _may_continue(self) -> bool:
        """Returns False once the sequence is over, or the target's stream is chosen and nothing is pending:
        no round, no correction among candidates and no kept tokens to be judged."""
        state = self._state
        state.finish_if_full()
        if state.is_over or not state.is_to_stream:
            return not state.is_over
        return bool(self._pipeline) or state.pending is not None or state.has_pending_reverification

    def _reopen(self) -> Iterator[SessionEvent]:
        state = self._state
        try:
            yield from open_session(state)
        except RoundTimeoutError as error:
            draft, draft_ms = state.proposer.propose(state.num_to_draft())
            state.recorder.timed_out(len(draft.token_ids), draft_ms)
            yield from fall_back(state, draft, error)
            yield from self._late_verdicts()

    def _start_round(self, branch: Branch[Round] | None) -> Iterator[SessionEvent]:
        """Drafts a round and sends it, unless its branch is invalidated, the draft's context is full or the
        gate keeps it."""
        state, pipeline = self._state, self._pipeline
        proposal = pipeline.propose(branch)
        draft = proposal.draft
        if branch is not None and (not draft.token_ids or pipeline.is_invalidated(branch, draft)):
            pipeline.abandon(branch, draft)
        elif self._is_draft_full(proposal):
            log.info("the draft's context is full: cloud-only from here")
            state.recorder.in_mode(ExecutionMode.CLOUD_ONLY, len(state.tokens.origins), "draft_full", {})
            yield from stream_cloud_only(state)
        else:
            proposal.judgement = state.proposer.judge(draft, proposal.assumed)
            if kept := keep_block(state, proposal):
                pipeline.begin_anew()
                yield from kept
            else:
                pipeline.send(proposal)

    def _is_draft_full(self, proposal: Proposal) -> bool:
        """Returns whether there will be no draft any more. Otherwise an empty draft is sent like any other: a
        strategy may have none now and one later."""
        if proposal.num_wanted == 0 or proposal.draft.token_ids or self._state.has_pending_reverification:
            return False
        drafter = self._state.proposer.drafter
        return drafter is None or drafter.is_full

    def _finish_round(self) -> Iterator[SessionEvent]:
        """Waits for the oldest round's verdict and applies it."""
        state = self._state
        self._plan_next()
        self._pipeline.prepare_next()
        try:
            answer = state.remote.verdict()
        except RoundTimeoutError as error:
            yield from fall_back(state, self._pipeline.time_out(), error)
        except UnknownPrefixError as error:
            self._pipeline.drop()
            state.failed(error.error)
            state.rewind(error.error)
        except SessionLostError as error:
            self._pipeline.drop()
            state.failed(error.error)
            state.lost()
        else:
            yield from self._pipeline.judge(answer)
        yield from self._late_verdicts()
        if not state.recorder.has_unobserved:
            self._choose()

    def _plan_next(self) -> None:
        """Has the policies take account of the last rounds, once the one in flight has left."""
        state = self._state
        if not state.recorder.is_plan_due:
            return
        state.remote.poll(LEAVING_S)
        state.recorder.observe()
        self._choose()  # planned now, not after the answer

    def _choose(self) -> None:
        state = self._state
        state.window.choose(state.tokens.num_remaining)
        state.plan_draft()
        if not state.is_to_stream:
            state.note_mode()

    def _late_verdicts(self) -> Iterator[SessionEvent]:
        for request, verdict in self._state.remote.take_late_verdicts():
            yield from apply_late_verdict(self._state, request, verdict)
