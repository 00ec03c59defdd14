"""The statistics of a generation: the one place that writes them while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.common.sequences import common_prefix
from outrider.common.tree import is_chain, main_path
from outrider.common.types import CorrectionKind, Draft, GeneratedTokens, Opened, Verdict
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import TreePolicy
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import JudgedTree, RoundOutcome, RoundRecord, SessionStats, Stretch
from outrider.edge_client.decode.rounds import Proposal, Round
from outrider.edge_client.transport.remote_verifier import Answer, RemoteVerifier


class Recorder:
    """Writes `stats`, and passes each round's record on to the depth policy and the window."""

    def __init__(
        self,
        depth: DepthPolicy,
        window: RoundWindow,
        conditions: Conditions | None = None,
        trees: TreePolicy | None = None,
    ) -> None:
        self.stats = SessionStats()
        self._depth = depth
        self._window = window
        self._conditions = conditions
        self._trees = trees  # with `--tree auto`
        self._unobserved: list[RoundRecord] = []
        # The first rounds are planned at once, however short they are.
        self._plans_at_once = conditions is None or (conditions.acceptance.is_copied and window.may_stream)

    def started(self, now_s: float) -> None:
        """Notes the beginning."""
        self.stats.start_ns = int(now_s * 1e9)

    def in_mode(
        self, mode: ExecutionMode, num_tokens: int, reason: str, expected_ms: Mapping[ExecutionMode, float]
    ) -> None:
        """Notes the mode that makes what follows the first `num_tokens` new tokens; the first one makes them too."""
        stretches = self.stats.stretches
        if not stretches or stretches[-1].mode != mode:
            expected = {str(each): round(ms, 3) for each, ms in expected_ms.items()}
            stretches.append(Stretch(str(mode), num_tokens if stretches else 0, expected, reason))

    def record(self, record: RoundRecord) -> None:
        """Adds a round's record, which policies see with `observe`, while the next round is in flight. Each of the
        first ones may change the plan: at once where a plan takes a small part of a round, as without conditions it
        does, or where the target may stream and drafts are copies, which are right for long or not at all."""
        self.stats.rounds.append(record)
        self._unobserved.append(record)
        if self._is_dense and (self._plans_at_once or not _is_short(record)):
            self.observe()

    @property
    def is_plan_due(self) -> bool:
        """Returns whether policies should see the last records: after the first rounds, of short ones several at a
        time."""
        records = self._unobserved
        is_seldom = bool(records) and _is_short(records[-1]) and not self._is_dense
        return len(records) >= (SETTINGS.rounds_a_plan if is_seldom else 1)

    @property
    def _is_dense(self) -> bool:
        return len(self.stats.rounds) <= SETTINGS.dense_rounds

    @property
    def has_unobserved(self) -> bool:
        """Returns whether policies have not seen the last records yet."""
        return bool(self._unobserved)

    def observe(self) -> None:
        """Passes on the records that policies have not seen."""
        records, self._unobserved = self._unobserved, []
        if self._conditions is not None:
            self._conditions.observe(*records)
        for each in records:
            self._depth.observe(each)
            self._window.observe(each)
            if self._trees is not None:
                self._trees.observe(each)

    def judged(self, round_: Round, num_accepted_tokens: int, answer: Answer) -> None:
        """Adds a round whose verdict was applied. Kept tokens are no draft; where one was rejected, what was
        drafted after them was not judged."""
        draft, metrics, judgement = round_.draft, answer.verdict.metrics, round_.judgement
        is_judged = answer.verdict.accepted_len >= round_.num_kept
        num_draft_tokens = len(draft.token_ids)
        judged_path = _judged_path(draft, answer.verdict)
        self.stats.last_tree = _judged_tree(draft, answer.verdict)
        if not is_judged:
            self.stats.num_wasted_draft_tokens += num_draft_tokens
            num_draft_tokens = 0
        self.record(
            RoundRecord(
                round_id=answer.verdict.round_id,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                has_no_proposal=round_.has_no_proposal,
                draft_ms=round_.draft_ms,
                edge_ms=round_.edge_ms,
                since_ms=round_.since_ms,
                rtt_ms=answer.wait_s * 1e3,
                net_ms=answer.wait_s * 1e3 - metrics.total_ns / 1e6,
                queue_ms=metrics.queue_ns / 1e6,
                forward_ms=metrics.forward_ns / 1e6,
                verifier_ms=metrics.total_ns / 1e6,
                batch_size=metrics.batch_size,
                num_active_sessions=metrics.num_active_sessions,
                step_token_ms=metrics.step_token_ns / 1e6,
                alpha_mean=metrics.alpha_mean,
                bytes_up=answer.bytes_up,
                bytes_down=answer.bytes_down,
                confidences=_confidences(draft, judged_path) if is_judged else (),
                window=round_.window,
                pipelined_hit=True if round_.is_ahead else None,
                is_guess_hit=round_.is_branch_hit,
                num_dropped_tokens=int(draft.doubted is not None),
                hard_ratio=None if judgement is None else judgement.hard_ratio,
                escalated=None if judgement is None else judgement.is_escalated,
                main_path=judged_path,
            )
        )

    def invalidated(self, round_: Round, *, is_first_wrong: bool) -> None:
        """Adds a round whose assumption was wrong. `is_first_wrong`: from its first token on."""
        num_draft_tokens, assumes_correction = len(round_.draft.token_ids), round_.assumes_correction
        self.stats.num_stale_rounds += not assumes_correction
        self.stats.num_wasted_draft_tokens += num_draft_tokens
        self.record(
            RoundRecord(
                round_.request.round_id,
                num_draft_tokens,
                draft_ms=round_.draft_ms,
                outcome=RoundOutcome.DISCARDED,
                window=round_.window,
                pipelined_hit=None if assumes_correction else False,
                is_first_wrong=is_first_wrong,
            )
        )

    def kept(self, proposal: Proposal) -> None:
        """Adds a draft that the commit-gate kept."""
        assert proposal.judgement is not None
        self.record(
            RoundRecord(
                0,
                len(proposal.draft.token_ids),
                draft_ms=proposal.draft_ms,
                outcome=RoundOutcome.KEPT,
                hard_ratio=proposal.judgement.hard_ratio,
                escalated=False,
            )
        )

    def timed_out(self, num_draft_tokens: int, draft_ms: float) -> None:
        """Adds a round that was not answered in time."""
        self.stats.num_timeouts += 1
        self.record(RoundRecord(0, num_draft_tokens, draft_ms=draft_ms, outcome=RoundOutcome.TIMED_OUT))

    def opened(self, opened: Opened, wait_s: float, *, is_rebuild: bool) -> None:
        """Adds an opening."""
        stats = self.stats
        stats.open_ms += wait_s * 1e3
        stats.num_rebuilds += is_rebuild
        stats.step_fixed_s = opened.step_fixed_ns / 1e9
        stats.step_session_s = opened.step_session_ns / 1e9
        stats.step_token_s = opened.step_token_ns / 1e9

    def streamed(
        self, tokens: GeneratedTokens, num_added: int, num_accepted: int | None, *, is_tree: bool = False
    ) -> None:
        """Adds a message of the verifier's stream. Where it is co-located, it is a round that crossed no
        network, with `num_accepted` tokens; `is_tree`: its draft was one."""
        stats, metrics = self.stats, tokens.metrics
        stats.num_generate_tokens += num_added
        if num_accepted is not None:
            self.record(
                RoundRecord(
                    round_id=tokens.round_id,
                    num_draft_tokens=tokens.num_draft_tokens,
                    num_accepted_tokens=num_accepted,
                    draft_ms=tokens.draft_ns / 1e6,
                    queue_ms=metrics.queue_ns / 1e6,
                    forward_ms=metrics.forward_ns / 1e6,
                    batch_size=metrics.batch_size,
                    num_active_sessions=metrics.num_active_sessions,
                    step_token_ms=metrics.step_token_ns / 1e6,
                    alpha_mean=metrics.alpha_mean,
                    main_path=(0, 0) if is_tree else None,  # which its messages do not tell
                )
            )
            self.observe()  # no round of ours waits for it
        elif metrics.forward_ns:
            stats.generate_forward_ms.append(metrics.forward_ns / 1e6)
            stats.generate_batch_sizes.append(metrics.batch_size)

    def stream_timed_out(self) -> None:
        """Counts a stream that fell silent."""
        self.stats.num_timeouts += 1

    def sent(self, round_: Round) -> None:
        """Counts a round that was sent on a predicted correction."""
        self.stats.num_guessed_rounds += round_.assumes_correction

    def promoted(self, round_: Round) -> None:
        """Counts a round that is judged because a predicted correction came."""
        self.stats.num_guess_hits += round_.is_branch_hit

    def abandoned(self, num_draft_tokens: int) -> None:
        """Counts drafted tokens that are not sent."""
        self.stats.num_wasted_draft_tokens += num_draft_tokens

    def late_verdict(self, num_cleared: int) -> None:
        """Counts a verdict that came after its deadline and cleared the marks of `num_cleared` tokens."""
        self.stats.num_late_verdicts += 1
        self.stats.num_marks_cleared += num_cleared

    def reverified(self, num_tokens: int) -> None:
        """Counts tokens that were kept unverified and that the target has chosen too."""
        self.stats.num_reverified_tokens += num_tokens

    def rolled_back(self, num_dropped: int, num_left: int) -> None:
        """Adds a rollback of `num_dropped` new tokens to `num_left`."""
        self.stats.num_rolled_back_tokens += num_dropped
        del self.stats.token_times_ns[num_left:]

    def closed(self, verifier: RemoteVerifier) -> None:
        """Adds the totals of the connection."""
        stats, traffic = self.stats, verifier.traffic
        stats.bytes_up, stats.bytes_down = traffic.bytes_up, traffic.bytes_down
        stats.num_reconnects, stats.num_refusals = verifier.num_reconnects, verifier.num_refusals


def _is_short(record: RoundRecord) -> bool:
    """Returns whether a plan takes as long as a noticeable part of the round."""
    return 0.0 < record.rtt_ms < SETTINGS.short_round_ms


def _confidences(draft: Draft, path: tuple[int, int] | None) -> tuple[float, ...]:
    """Returns those of a chain's tokens, or of a tree's likeliest path, of which `path` says the length."""
    return draft.confidences if path is None else draft.confidences[: path[1]]


def _judged_tree(draft: Draft, verdict: Verdict) -> JudgedTree | None:
    """Returns a draft that has branches with its verdict; None for a chain."""
    if is_chain(draft.parents):
        return None
    is_over = verdict.correction_kind is CorrectionKind.NONE
    following = None if is_over else verdict.correction
    return JudgedTree(draft.token_ids, draft.parents, verdict.accepted_nodes, following)


def _judged_path(draft: Draft, verdict: Verdict) -> tuple[int, int] | None:
    """Returns how many tokens of a tree's likeliest path were accepted, and its length; None for a chain."""
    if not draft.parents:
        return None
    length = len(main_path(draft.token_ids, draft.parents))
    return common_prefix(verdict.accepted_indices, range(length)), length
