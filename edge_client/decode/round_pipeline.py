"""A round's life: sent, then judged, invalidated or timed out, and what each of these changes."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.common.types import Draft
from outrider.edge_client.controller.window import MAX_UNANSWERED
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.round_request import make_request
from outrider.edge_client.decode.rounds import Proposal, Round, RoundsInFlight
from outrider.edge_client.decode.speculation import create_speculation
from outrider.edge_client.decode.verdicts import apply_verdict
from outrider.edge_client.transport.remote_verifier import Answer


class RoundPipeline:
    """Owns the rounds in flight and what is learnt from them for the choice of the next branch."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._rounds = RoundsInFlight()
        self._speculation = create_speculation(state)

    def __len__(self) -> int:
        return len(self._rounds)

    def next_branch(self) -> Branch[Round] | None:
        """Returns the branch to draft on while rounds are in flight; None: their verdicts come first."""
        remote = self._state.remote
        branch = self._speculation.best(self._rounds, self._state.window)
        if branch is None or remote.num_unanswered >= MAX_UNANSWERED or remote.poll()[0] is not None:
            return None
        return branch

    def is_invalidated(self, branch: Branch[Round], next_token: int | None = None) -> bool:
        """Returns whether the replies that arrived so far exclude `branch`, with `next_token`, where it is
        drafted already, as its first token."""
        return self._rounds.is_invalidated(self._state.remote.poll(), branch, next_token)

    def abandon(self, branch: Branch[Round], draft: Draft) -> None:
        """Drops a draft that was made on `branch`; where it is empty, none can be made there."""
        self._state.recorder.abandoned(len(draft.token_ids))
        if not draft.token_ids:
            self._speculation.close(branch)

    def send(self, proposal: Proposal) -> None:
        """Sends a round; never waits."""
        state = self._state
        drafted_s = state.clock.now() - proposal.started_s if proposal.branch is None else 0.0
        request = make_request(state, proposal, drafted_s)
        state.remote.submit(request, drafted_s)
        sent = Round(request, proposal, state.window.size)
        self._rounds.append(sent)
        self._speculation.sent(sent)
        state.recorder.sent(sent)

    def judge(self, answer: Answer) -> list[SessionEvent]:
        """Applies the verdict of the oldest round, and drops the rounds that assumed something else."""
        state, answered = self._state, self._rounds.pop()
        events = apply_verdict(state, answered, answer)
        if events is not None:
            self._speculation.judged(answered, answer.verdict)
        self._resolve(answered)
        out_s = state.clock.now() - answer.came_s
        state.remote.deadline.observe_out(out_s + answered.draft_token_s)
        return events or []

    def _resolve(self, answered: Round) -> None:
        """Drops the rounds whose assumption turned out wrong; the verifier detects them by their hash."""
        state, rounds = self._state, self._rounds
        next_round = None
        if rounds:
            next_round, are_kept = rounds.resolve(answered, state.tokens)
            if state.tokens.finish is not None or state.must_open:
                next_round, are_kept = None, [False] * len(rounds)
            if not all(are_kept):
                state.remote.retain(are_kept)
                self._invalidate(rounds.retain(are_kept))
            if next_round is not None:
                next_round.promote()
                state.recorder.promoted(next_round)
        self._speculation.resolved(next_round, list(rounds))

    def time_out(self) -> Draft:
        """Drops all rounds after the oldest missed its deadline, and returns what is left of its draft."""
        oldest, *others = self._rounds.clear()
        self._state.recorder.timed_out(len(oldest.draft.token_ids), oldest.draft_ms)
        self._invalidate(others)
        # A bonus may have put the first token into the sequence already.
        return Draft(oldest.request.draft_tokens[self._state.tokens.position - oldest.start :], ())

    def drop(self) -> None:
        """Drops all rounds after the verifier rejected the oldest."""
        self._invalidate(self._rounds.clear()[1:])

    def _invalidate(self, rounds: Sequence[Round]) -> None:
        tokens = self._state.tokens
        for each in rounds:
            has_other_token = tokens.finish is None and tokens.position > each.start
            is_first_wrong = has_other_token and each.is_base_met(tokens)
            self._state.recorder.invalidated(each, is_first_wrong=is_first_wrong)
            if is_first_wrong:
                self._speculation.first_token_rejected(each, tokens.chain.token_ids[each.start])
