"""A round's life: sent, then judged, invalidated or timed out, and what each of these changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from outrider.common.methods import sends_probs, sends_support
from outrider.common.tree import Tree, is_chain, likeliest_after, main_path
from outrider.common.types import Draft, Method, Verdict, VerifyRequest
from outrider.edge_client.controller.acceptance import BranchAcceptance
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.window import MAX_UNANSWERED, RoundWindow
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.decode.branch_tree import Branch, BranchTree
from outrider.edge_client.decode.generation_state import GenerationState
from outrider.edge_client.decode.reverify import kept_for_round, num_after_kept
from outrider.edge_client.decode.rounds import (
    Proposal,
    Round,
    assumed_tokens,
    first_tokens,
    is_invalidated,
    resolve,
    tokens_of_branch,
)
from outrider.edge_client.decode.verdicts import apply_verdict
from outrider.edge_client.drafting.trees import TreeDraft
from outrider.edge_client.transport.remote_verifier import Answer

LEAVING_S = 0.0005  # until a message has left: the link's threads need the interpreter for it


def propose_round(
    state: GenerationState, branch: Branch[Round] | None, is_invalidated: Callable[[], bool] | None
) -> Proposal:
    """Drafts a round on `branch`, until `is_invalidated`."""
    started_s = state.clock.now()
    assumed, kept = assumed_tokens(branch, state.tokens), kept_for_round(state)
    if (budget := state.tree_budget(len(assumed))) is not None and not kept and state.pending is None:
        draft, draft_ms = state.proposer.propose_tree(budget, assumed)
        return Proposal(draft, draft_ms, branch, assumed, kept, budget.num_nodes, started_s)
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
        q_token_probs=draft.draft_probs if sends_probs(method) and not kept and not draft.parents else (),
        hard_mask=b"" if judgement is None or kept else judgement.hard_mask,
        q_support=draft.supports if sends_support(method) else (),
        parents=() if is_chain(draft.parents) else draft.parents,
        candidates_from=pending.num_seen if pending is not None else 0,
        pipelined=state.window.size > 1 and _may_continue(state, draft, len(proposal.assumed)),
        deadline_ms=state.remote.deadline_ms(drafted_s),
    )


def _may_continue(state: GenerationState, draft: Draft, num_assumed: int) -> bool:
    """Returns whether another round may follow this one before its verdict. A token that the gate doubted is
    waited for."""
    if draft.doubted is not None or not draft.token_ids or state.has_pending_reverification:
        return False
    path = main_path(draft.token_ids, draft.parents)
    if len(state.tokens.until_stop(path)) < len(path):
        return False
    return state.num_to_draft(num_assumed + len(path)) > 0


class Speculation:
    """Keeps the branches of the rounds in flight. Without runner-ups (`predicts_corrections`) only those on
    which every draft is accepted are opened, and there is nothing to learn."""

    def __init__(self, predicts_corrections: bool) -> None:
        self.predicts_corrections = predicts_corrections
        self._rates = BranchAcceptance()
        self._branches: BranchTree[Round] = BranchTree(self._rates)

    def best(self, num_in_flight: int, window: RoundWindow) -> Branch[Round] | None:
        """Returns the branch to draft on; None where enough rounds are in flight or no branch is likely
        enough."""
        if num_in_flight >= (window.max_rounds if self.predicts_corrections else window.size):
            return None
        branch = self._branches.best(None if window.is_branching else _assumes_acceptance)
        return branch if branch is not None and branch.chance >= SETTINGS.min_branch_probability else None

    def close(self, branch: Branch[Round]) -> None:
        """Closes a branch that a round was drafted on, or on which none can be."""
        self._branches.close(branch)

    def sent(self, round_: Round) -> None:
        """Opens the branches of a round that was sent."""
        before, parent = None, round_.parent
        if parent is None:  # nothing else is in flight
            self._branches.clear()
        else:
            self.close(parent)
            if parent.correction is None:
                before = (parent.host, parent.nodes)
        if not round_.request.pipelined:  # it reaches the end, or nearly
            return
        if isinstance(round_.draft, TreeDraft) and round_.request.parents:
            self._add_leaves(round_, round_.draft)
        else:
            runner_ups = round_.draft.runner_ups if self.predicts_corrections else ()
            length = len(round_.request.draft_tokens)
            self._branches.add(round_, length, round_.chance, runner_ups, before)

    def _add_leaves(self, round_: Round, draft: TreeDraft) -> None:
        """Opens the branches after a tree's leaves: of the likeliest path alone where nothing is predicted."""
        tree = Tree(draft.parents)
        leaves = [run[-1] for run in tree.runs]
        if not self.predicts_corrections:
            del leaves[1:]
        chances = [round_.chance * draft.values[leaf] for leaf in leaves]
        self._branches.add_paths(round_, [tree.path(leaf) for leaf in leaves], chances)

    def judged(self, round_: Round, verdict: Verdict) -> None:
        """Learns from a verdict. Kept tokens have no runner-ups."""
        if not round_.num_kept and not round_.draft.parents:
            self._rates.observe(round_.draft.runner_ups, verdict.accepted_len, verdict.correction)

    def first_token_rejected(self, round_: Round, token_id: int) -> None:
        """Learns from an invalidated round in place of whose first token the sequence has `token_id`."""
        if not round_.draft.parents:
            self._rates.observe(round_.draft.runner_ups, 0, token_id)

    def resolved(self, next_round: Round | None, rounds: Sequence[Round]) -> None:
        """Drops the branches of all but `rounds`, the first of which, `next_round`, will be judged."""
        kept = set(map(id, rounds))
        chance = next_round.chance if next_round is not None else 1.0
        self._branches.retain(lambda host: id(host) in kept, chance)
        for each in rounds:
            each.chance = min(1.0, each.chance / chance)


def _assumes_acceptance(branch: Branch[Round]) -> bool:
    return branch.correction is None and not branch.host.assumes_correction


def create_speculation(state: GenerationState) -> Speculation:
    """Creates it, with predicted corrections where several rounds may be in flight and they are possible."""
    drafter = state.proposer.drafter
    may_predict = state.window.may_branch and state.options.method is Method.COUPLED
    return Speculation(may_predict and drafter is not None and drafter.has_runner_ups)


class RoundPipeline:
    """Owns the rounds in flight and what is learnt from them for the choice of the next branch."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._rounds: deque[Round] = deque()  # oldest first
        self._speculation = create_speculation(state)
        self._came_s: float | None = None  # when the last answer did

    def __len__(self) -> int:
        return len(self._rounds)

    def next_branch(self) -> Branch[Round] | None:
        """Returns the branch to draft on while rounds are in flight; None: their verdicts come first."""
        remote = self._state.remote
        branch = self._speculation.best(len(self._rounds), self._state.window)
        if branch is None or remote.num_unanswered >= MAX_UNANSWERED or remote.poll()[0] is not None:
            return None
        return branch

    def propose(self, branch: Branch[Round] | None) -> Proposal:
        """Drafts a round on `branch` until that is invalidated; None: after the sequence, with nothing in flight."""
        drafter = self._state.proposer.drafter
        if self._speculation.predicts_corrections and drafter is not None:
            drafter.keep_runner_ups(self._state.window.is_branching)
        is_invalidated = None if branch is None else partial(self.is_invalidated, branch)
        return propose_round(self._state, branch, is_invalidated)

    def is_invalidated(self, branch: Branch[Round], draft: Draft | None = None) -> bool:
        """Returns whether the replies that arrived so far exclude `branch`, with `draft` on it, where that is made
        already."""
        next_tokens = () if draft is None else first_tokens(draft)
        return is_invalidated(self._rounds, self._state.remote.poll(), branch, next_tokens)

    def abandon(self, branch: Branch[Round], draft: Draft) -> None:
        """Drops a draft that was made on `branch`; where it is empty, none can be made there."""
        self._state.recorder.abandoned(len(draft.token_ids))
        if not draft.token_ids:
            self._speculation.close(branch)

    def send(self, proposal: Proposal) -> None:
        """Sends a round; never waits."""
        state = self._state
        now_s = state.clock.now()
        drafted_s = now_s - proposal.started_s if proposal.branch is None else 0.0
        request = make_request(state, proposal, drafted_s)
        state.remote.submit(request, drafted_s)
        sent = Round(request, proposal, state.window.size)
        if self._came_s is not None and proposal.branch is None:
            sent.edge_ms = max(0.0, 1e3 * (now_s - self._came_s) - proposal.draft_ms)
        self._rounds.append(sent)
        self._speculation.sent(sent)
        state.recorder.sent(sent)

    def prepare_next(self) -> None:
        """Has the draft prepare the next round, once the last one has left, as far as it can before the oldest
        one's verdict arrives. That verdict moves the sequence by a draft and a bonus at most."""
        drafter, remote = self._state.proposer.drafter, self._state.remote
        if drafter is None:
            return
        wait_s = LEAVING_S
        for _ in drafter.prepare(2 * len(self._rounds[-1].draft.token_ids) + 1):
            if remote.poll(wait_s)[0] is not None:
                return
            wait_s = 0.0

    def judge(self, answer: Answer) -> list[SessionEvent]:
        """Applies the verdict of the oldest round, and drops the rounds that assumed something else."""
        state, answered = self._state, self._rounds.popleft()
        if self._came_s is not None and answer.is_ordinary:
            answered.since_ms = 1e3 * (answer.came_s - self._came_s)
        events = apply_verdict(state, answered, answer)
        if events is not None:
            self._speculation.judged(answered, answer.verdict)
            if not answered.num_kept:  # they come before the draft
                state.proposer.observe(answered.draft, answer.verdict)
        self._resolve(answered)
        self._came_s = answer.came_s
        out_s = state.clock.now() - answer.came_s
        state.remote.deadline.observe_out(out_s + answered.draft_token_s)
        return events or []

    def _resolve(self, answered: Round) -> None:
        """Drops the rounds whose assumption turned out wrong; the verifier detects them by their hash."""
        state, rounds = self._state, self._rounds
        if not rounds:
            return
        next_round, are_kept = resolve(rounds, answered, state.tokens)
        if state.tokens.finish is not None or state.must_open:
            next_round, are_kept = None, [False] * len(rounds)
        if not all(are_kept):
            state.remote.retain(are_kept)
            pairs = list(zip(rounds, are_kept, strict=True))
            self._rounds = deque(each for each, is_kept in pairs if is_kept)
            self._invalidate([each for each, is_kept in pairs if not is_kept])
        if next_round is not None:
            next_round.promote()
            state.recorder.promoted(next_round)
        self._speculation.resolved(next_round, self._rounds)

    def time_out(self) -> Draft:
        """Drops all rounds after the oldest missed its deadline, and returns what is left of its draft."""
        oldest = self._rounds[0]
        self._state.recorder.timed_out(len(oldest.draft.token_ids), oldest.draft_ms)
        self.drop()
        # A bonus may have put the first token into the sequence already: of a tree any child of its root.
        known = self._state.tokens.chain.token_ids[oldest.start :]
        return Draft(likeliest_after(oldest.request.draft_tokens, oldest.request.parents, known), ())

    def begin_anew(self) -> None:
        """Forgets when the last answer came: the time until the next one is not that of a round."""
        self._came_s = None

    def drop(self) -> None:
        """Drops all rounds after the verifier rejected the oldest."""
        self.begin_anew()
        _, *others = self._rounds
        self._rounds.clear()
        self._invalidate(others)

    def _invalidate(self, rounds: Sequence[Round]) -> None:
        tokens = self._state.tokens
        for each in rounds:
            has_other_token = tokens.finish is None and tokens.position > each.start
            is_first_wrong = has_other_token and each.is_base_met(tokens)
            self._state.recorder.invalidated(each, is_first_wrong=is_first_wrong)
            if is_first_wrong:
                self._speculation.first_token_rejected(each, tokens.chain.token_ids[each.start])
