"""The main loop: propose, send, take the verdict; repair or fall back when that fails.

One loop, synchronous or pipelined: with a window of one round (`controller.window` sizes it) each verdict
is waited for before the next draft. With more, the edge drafts on behind what it sent as if all of it stood,
or, where that is likelier, as if the verifier corrected it to what the edge guesses (`decode.branch_tree`);
what turns out otherwise is dropped at once, and the verifier answers it without computing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from outrider.common.errors import RoundTimeoutError
from outrider.common.types import CorrectionKind, Draft, FinishReason, Origin, RoundError, Verdict
from outrider.edge_client.controller.window import MAX_UNANSWERED
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.decode.branch_tree import Branch
from outrider.edge_client.decode.branching import create_branches
from outrider.edge_client.decode.cloud_only import stream_cloud_only
from outrider.edge_client.decode.commit_gate import keep_block
from outrider.edge_client.decode.correction import PendingCorrection
from outrider.edge_client.decode.fallback import fall_back
from outrider.edge_client.decode.generation_state import Decoding
from outrider.edge_client.decode.opening import open_session
from outrider.edge_client.decode.reverify import hold_against, kept_for_round, num_behind, take_late_verdict
from outrider.edge_client.decode.round_request import make_request
from outrider.edge_client.decode.rounds import Round, RoundsInFlight
from outrider.edge_client.decode.token_buffer import SessionText
from outrider.edge_client.decode.verdicts import (
    agrees,
    can_choose,
    disagreement,
    make_record,
    make_stale_record,
    tokens_of,
)
from outrider.edge_client.transport.remote_verifier import Answer, SessionLostError, UnknownPrefixError

log = logging.getLogger(__name__)


class SpeculativeLoop:
    """Rounds until the text ends. `run` yields events; errors nobody can repair propagate."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._rounds = RoundsInFlight()
        self._branches = create_branches(decoding)

    def run(self) -> Iterator[SessionEvent]:
        """Until the text ends, or the target's own stream is chosen and nothing is under way any more."""
        while not self._decoding.is_over:
            if self._decoding.text.finish is None and not self._decoding.context_room:
                self._decoding.text.finish = FinishReason.CONTEXT
            elif self._may_leave():
                return
            elif self._decoding.must_open:
                yield from self._reopen()
            elif not self._rounds:
                yield from self._send_round(None)
            elif (branch := self._next_branch()) is not None:
                yield from self._send_round(branch)
            else:
                yield from self._take_answer()
                yield from self._take_late_verdicts()
                self._decoding.window.choose(self._decoding.text.num_remaining)

    def _may_leave(self) -> bool:
        """A correction still to be chosen is first chosen, kept tokens to be judged are judged."""
        decoding = self._decoding
        if self._rounds or decoding.pending is not None or decoding.is_owed:
            return False
        return decoding.is_to_stream

    def _reopen(self) -> Iterator[SessionEvent]:
        try:
            yield from open_session(self._decoding)
        except RoundTimeoutError as error:
            draft, draft_ms = self._decoding.proposer.propose(self._decoding.num_to_draft())
            self._count_timeout(len(draft.token_ids), draft_ms)
            yield from fall_back(self._decoding, draft, error)
            yield from self._take_late_verdicts()

    def _next_branch(self) -> Branch[Round] | None:
        """Where to draft on behind the rounds under way; None: their verdicts come first."""
        remote = self._decoding.remote
        branch = self._branches.best(self._rounds, self._decoding.window)
        if branch is None or remote.num_unanswered >= MAX_UNANSWERED or remote.poll()[0] is not None:
            return None
        return branch

    def _send_round(self, branch: Branch[Round] | None) -> Iterator[SessionEvent]:
        """On `branch`; None: behind the text, with nothing under way."""
        decoding = self._decoding
        begun_s = decoding.remote.lifeline.now_s
        assumed = self._rounds.assumed(decoding.text, branch)
        num_draft_tokens = decoding.num_to_draft(len(assumed)) if decoding.pending is None else 0
        to_judge = kept_for_round(decoding)
        num_draft_tokens = num_behind(decoding, len(to_judge), num_draft_tokens)
        is_spoilt = None if branch is None else partial(self._is_spoilt, branch)
        draft, draft_ms = decoding.proposer.propose(num_draft_tokens, assumed, is_spoilt, is_gated=True)
        if branch is not None and (not draft.token_ids or self._is_spoilt(branch, draft.token_ids[0])):
            self._give_up(branch, draft)
            return  # to the verdict that is there
        if num_draft_tokens > 0 and not draft.token_ids and _is_draft_over(decoding) and not decoding.is_owed:
            log.info("the draft's context is full: cloud-only from here")
            yield from stream_cloud_only(decoding)
            return
        judgement = decoding.proposer.judge(draft, assumed)
        if kept := keep_block(decoding, draft, draft_ms, judgement):
            yield from kept
            return
        drafted_s = decoding.remote.lifeline.now_s - begun_s if branch is None else 0.0
        request = make_request(decoding, draft, drafted_s, branch, len(assumed), judgement, to_judge)
        decoding.remote.submit(request, drafted_s)
        sent = Round(request, draft, draft_ms, decoding.window.size, judgement, branch)
        self._rounds.append(sent)
        self._branches.grow(sent)
        decoding.stats.num_guessed_rounds += sent.is_guess

    def _is_spoilt(self, branch: Branch[Round], next_token: int | None = None) -> bool:
        return self._rounds.are_spoilt(self._decoding.remote.poll(), branch, next_token)

    def _give_up(self, branch: Branch[Round], draft: Draft) -> None:
        self._decoding.stats.num_wasted_draft_tokens += len(draft.token_ids)
        if not draft.token_ids:
            self._branches.take(branch)

    def _take_answer(self) -> Iterator[SessionEvent]:
        """Of the oldest round."""
        decoding = self._decoding
        try:
            answer = decoding.remote.verdict()
        except RoundTimeoutError as error:
            oldest, *behind = self._rounds.clear()
            self._count_timeout(len(oldest.draft.token_ids), oldest.draft_ms)
            self._count_stale(behind)
            # What a bonus made text already is not kept again.
            left = oldest.request.draft_tokens[decoding.text.position - oldest.start :]
            yield from fall_back(decoding, Draft(left, ()), error)
        except UnknownPrefixError as error:
            self._count_stale(self._rounds.clear()[1:])
            self._repair(error.error)
        except SessionLostError as error:
            self._count_stale(self._rounds.clear()[1:])
            decoding.note_failure(error.error)
            decoding.must_open = True
        else:
            answered = self._rounds.pop()
            events = self._take(answered, answer)
            self._settle(answered)
            out_s = decoding.remote.lifeline.now_s - answer.came_s
            decoding.remote.deadline.observe_out(out_s + answered.draft_token_s)
            yield from events

    def _settle(self, answered: Round) -> None:
        """Rounds that assumed what did not come true are dropped; the verifier knows them by their hash."""
        decoding, text, rounds = self._decoding, self._decoding.text, self._rounds
        if not rounds:
            self._branches.settle(None, ())
            return
        heir, are_kept = rounds.settle(answered, text)
        if text.finish is not None or decoding.must_open:
            heir, are_kept = None, [False] * len(rounds)
        if not all(are_kept):
            decoding.remote.keep_rounds(are_kept)
            self._count_stale(rounds.keep(are_kept))
        if heir is not None:
            heir.is_guess_hit = heir.is_guess
            decoding.stats.num_guess_hits += heir.is_guess_hit
            heir.behind = None
        self._branches.settle(heir, list(rounds))

    def _count_stale(self, rounds: list[Round]) -> None:
        stats, text = self._decoding.stats, self._decoding.text
        stats.num_stale_rounds += sum(not each.is_guess for each in rounds)
        for each in rounds:
            is_first_wrong = text.finish is None and _is_first_wrong(each, text)
            stats.num_wasted_draft_tokens += len(each.draft.token_ids)
            self._decoding.record(make_stale_record(each, is_first_wrong=is_first_wrong))
            if is_first_wrong:
                self._branches.observe_first_wrong(each)

    # ------------------------------------------------------------------------------------ verdicts

    def _take(self, round_: Round, answer: Answer) -> list[SessionEvent]:
        decoding, text, verdict = self._decoding, self._decoding.text, answer.verdict
        token_ids, origins = tokens_of(round_.request, verdict)
        is_true = agrees(text.chain, text.settled_position, round_, verdict, token_ids)
        if not is_true or not can_choose(decoding.pending, verdict, round_.draft):
            decoding.note_failure(disagreement(verdict))
            decoding.must_open = True  # whatever it has there, it is not this text
            return []
        decoding.note_success()
        self._branches.observe(round_, verdict)
        judged: list[SessionEvent] = []
        if text.position > round_.start:  # kept tokens, or the bonus of the round before, drafted right
            judged = hold_against(decoding, round_.start, token_ids, verdict.logprobs)
        num_known = text.position - round_.start
        added = decoding.add(token_ids[num_known:], origins[num_known:], verdict.logprobs[num_known:])
        text.acknowledge(verdict.position)
        if verdict.accepted_len < round_.num_kept:
            decoding.stats.num_wasted_draft_tokens += len(round_.draft.token_ids)
        num_accepted = max(0, min(num_known, verdict.accepted_len) - round_.num_kept)
        num_accepted += sum(event.origin is Origin.ACCEPTED for event in added)
        decoding.record(make_record(round_, num_accepted, answer))
        events = [*judged, *added]
        if text.finish is None:
            if verdict.candidates:
                events += self._choose(round_.draft, verdict)
            elif verdict.correction_kind is CorrectionKind.NONE and not round_.request.pipelined:
                text.finish = FinishReason.STOP
        return events

    def _choose(self, draft: Draft, verdict: Verdict) -> list[TokenEvent]:
        """The correction, if one of the candidates passes. It is ours alone until the next round carries it,
        and has no log-probabilities."""
        decoding = self._decoding
        if decoding.pending is None:
            support = draft.supports[verdict.accepted_len]
            decoding.pending = PendingCorrection(decoding.text.position, support)
        token_id = decoding.pending.choose(verdict.candidates, decoding.options.sampling.seed)
        return [] if token_id is None else decoding.add((token_id,), (Origin.CORRECTION,))

    def _take_late_verdicts(self) -> Iterator[SessionEvent]:
        for request, verdict in self._decoding.remote.take_late_verdicts():
            yield from take_late_verdict(self._decoding, request, verdict)

    # ------------------------------------------------------------------------------------- repairs

    def _repair(self, error: RoundError) -> None:
        """Goes on from where the verifier says it is, if that is our text; else opens again."""
        self._decoding.note_failure(error)
        text = self._decoding.text
        if self._decoding.pending is not None:  # candidates are asked for behind the whole text
            self._decoding.must_open = True
        elif error.position >= text.num_prompt_tokens and text.chain.agrees(error.position, error.hash):
            position = min(error.position, text.settled_position)
            is_new = position != text.acked_position
            text.acknowledge(position)
            self._decoding.must_open = not is_new
        else:
            self._decoding.must_open = True

    def _count_timeout(self, num_draft_tokens: int, draft_ms: float) -> None:
        self._decoding.stats.num_timeouts += 1
        self._decoding.record(RoundRecord(0, num_draft_tokens, draft_ms=draft_ms, is_answered=False))


def _is_draft_over(decoding: Decoding) -> bool:
    """An empty draft is else a round like any other: a strategy may know nothing now and more later."""
    return decoding.proposer.drafter is None or decoding.proposer.drafter.is_full


def _is_first_wrong(each: Round, text: SessionText) -> bool:
    """Whether the text has another token where the round's draft begins."""
    request = each.request
    return text.position > each.start and text.chain.agrees(request.base_position, request.base_hash)
