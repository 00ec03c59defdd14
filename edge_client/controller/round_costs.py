"""Estimates what recent rounds cost, in the terms of the cost model. Pure.

Medians rather than means: a verifier's first forwards, a slow step or a stalled packet do not predict the
next round, and one of them in a mean would shorten drafts for many rounds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.common.step_time import MedianSlopeTime
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.stats import RoundRecord

_Line = tuple[float, float]
"""Is a time over tokens: (base, a token) in seconds."""


class StepTimes(NamedTuple):
    """Holds what a verifier states of its steps, in seconds."""

    fixed_s: float
    token_s: float
    session_s: float = 0.0
    stream_gap_s: float = 0.0  # between two steps of a stream alone; 0: not known

    @classmethod
    def from_ns(cls, fixed: int, token: int, session: int, stream_gap: int) -> StepTimes:
        """Returns those that an opening has in nanoseconds."""
        return cls(fixed / 1e9, token / 1e9, session / 1e9, stream_gap / 1e9)

    @property
    def are_known(self) -> bool:
        """Returns whether steps were measured: parts of zero mean that there were none yet."""
        return bool(self.fixed_s or self.token_s or self.session_s)

    @property
    def alone(self) -> _Line:
        """Returns the line of steps of one session."""
        return self.fixed_s + self.session_s, self.token_s

    def stream_s(self, num_sessions: float) -> float:
        """Returns a step of one token for each of so many sessions."""
        return self.fixed_s + num_sessions * (self.session_s + self.token_s)


@dataclass(frozen=True, slots=True)
class EarlierCosts:
    """Holds what the earlier sequences of a process found; at first what is usual, None where nothing is."""

    # Of a streamed token beyond the verifier's step (None: not known), and of the edge in a round, without drafting.
    stream_overhead_s: float | None = None
    round_overhead_s: float = field(default_factory=lambda: SETTINGS.round_overhead_s)
    rtt_s: float | None = None  # of a round alone
    draft_line: _Line | None = None
    stated: StepTimes | None = None
    num_sharing: float = 1.0  # active sessions of the verifier


class _Times:
    """Holds times over tokens, of those that overlapped nothing apart.

    Where drafting and verifying share processors, each slows the other, and the link's answers too: what overlapped
    is an upper bound. It counts where it is faster than what is known of times alone, or nothing is.
    """

    def __init__(self, prior_share: float, prior_weight_tokens: float) -> None:
        """See `MedianSlopeTime`."""
        fit = SETTINGS.num_verify_samples, prior_share, prior_weight_tokens
        self.recent, self._alone = MedianSlopeTime(*fit), MedianSlopeTime(*fit)
        self._has_overlapped = False

    def observe(self, num_tokens: int, seconds: float, is_alone: bool) -> None:
        """Adds a time; `is_alone`: nothing else of this session was computed meanwhile."""
        self.recent.observe(num_tokens, seconds)
        if is_alone:
            self._alone.observe(num_tokens, seconds)
        self._has_overlapped = self._has_overlapped or not is_alone

    def line(
        self,
        prior_token_s: Callable[[MedianSlopeTime], float | None],
        stated: _Line | None = None,
        weight_tokens: float | None = None,
    ) -> _Line:
        """Returns the line of recent times, or the lower one of those alone, of `stated` before any was. The other
        arguments give a fit its prior slope and that one's weight."""
        recent, known = self.recent.line(prior_token_s(self.recent), weight_tokens), stated
        if not self._has_overlapped:
            return recent
        if self._alone.has_any:
            known = self._alone.line(prior_token_s(self._alone), weight_tokens)
        num_tokens = self.recent.mean_tokens
        return min(recent, known or recent, key=lambda line: line[0] + num_tokens * line[1])


class RoundCosts:
    """Estimates the draft's time per token, the verifier's as a line over the tokens fed (the draft's and one
    more) with its queue included, and the link's as the median of recent round trips.

    The link's rates are not separated from its delay: the longest draft is some 800 bytes, which take less
    than what round trips differ by on all but links of well under a megabit a second.
    """

    def __init__(self, *, is_local: bool = False, earlier: EarlierCosts | None = None) -> None:
        """`is_local`: the verifier runs on this machine, so that a round trip is work of its processors. `earlier`:
        see `start_from`."""
        self._max_work_s = SETTINGS.max_link_work_s if is_local else 0.0
        self._max_delay_s = SETTINGS.max_shared_delay_s if is_local else 0.0  # of a trip by other threads
        self._verify = _Times(SETTINGS.token_share_of_verify, SETTINGS.token_share_weight_tokens)
        self._queues_s: deque[float] = deque(maxlen=SETTINGS.num_verify_samples)  # that `_verify` includes
        self._rtts_s: deque[float] = deque(maxlen=SETTINGS.num_rtt_samples)
        self._rtts_alone_s: deque[float] = deque(maxlen=SETTINGS.num_rtt_samples)  # as `_Times` has them
        self._edge_s: deque[float] = deque(maxlen=SETTINGS.num_rtt_samples)
        self._targets_s: deque[float] = deque(maxlen=SETTINGS.num_verify_samples)
        self._overheads_s: deque[float] = deque(maxlen=SETTINGS.num_verify_samples)  # of them, beyond a step
        self._opening_s: float | None = None
        # Active sessions of the verifier, with each answer.
        self._sharing: deque[int] = deque(maxlen=SETTINGS.num_verify_samples)
        # What one more token of every such session would have added to each round, in seconds.
        self._shared_token_s: deque[float] = deque(maxlen=SETTINGS.num_verify_samples)
        self._num_rounds = 0
        self._drafts = _Times(1.0, SETTINGS.draft_weight_tokens)
        self._tree_drafts = MedianSlopeTime(
            SETTINGS.num_verify_samples, prior_share=1.0, prior_weight_tokens=SETTINGS.draft_weight_tokens
        )
        self.start_from(earlier or EarlierCosts())

    def start_from(self, earlier: EarlierCosts) -> None:
        """Begins with what earlier sequences found, before anything of this one was observed."""
        self.earlier = earlier
        self._stated = earlier.stated
        self._estimate: tuple[ModelCosts, LinkCosts] | None = None  # until something is observed

    def learned(self) -> EarlierCosts:
        """Returns what the next sequence begins with. A draft, a link and an edge are known by rounds; of a streamed
        token the next sequence's time counts as much as all before it."""
        earlier, memory = self.earlier, SETTINGS.stream_overhead_memory
        edge_s, stream_s = self.measured_round_overhead_s, self.measured_stream_overhead_s
        if stream_s is None or self.is_shared:
            stream_s = earlier.stream_overhead_s
        else:
            stream_s = min(stream_s, SETTINGS.max_stream_overhead_s)
            stream_s = memory * self._usual_stream_overhead_s + (1 - memory) * stream_s
        if edge_s is None:
            return replace(
                earlier, stream_overhead_s=stream_s, stated=self._stated, num_sharing=self.num_sharing
            )
        rtt_s = earlier.rtt_s if self.measured_rtt_s is None else self.measured_rtt_s
        has_drafted = self._drafts.recent.has_any or self._tree_drafts.has_any
        draft_line = self._draft_line() if has_drafted else earlier.draft_line
        return EarlierCosts(stream_s, edge_s, rtt_s, draft_line, self._stated, self.num_sharing)

    @property
    def is_known(self) -> bool:
        """Returns whether draft, link and verifier were observed, by this sequence or an earlier one."""
        has_link = self._rtts_s or self.earlier.rtt_s is not None
        has_verifier = (
            self._num_rounds or self._targets_s or self._opening_s is not None or self._stated is not None
        )
        return self.has_draft and bool(has_link) and bool(has_verifier)

    @property
    def has_draft(self) -> bool:
        """Returns whether the time of a drafted token was observed."""
        return self._drafts.recent.has_any or self.earlier.draft_line is not None

    def observe(self, record: RoundRecord) -> None:
        """Adds an answered round.

        A co-located round has no `net_ms`, and its forward's time in place of the verifier's. A round that
        was sent ahead waited for our own earlier rounds, which is not part of its verification.
        """
        is_alone = record.window == 1
        if record.main_path is None:
            num_drafted = record.num_draft_tokens + record.num_dropped_tokens
            self.observe_draft(record.draft_ms / 1e3, num_drafted, is_alone=is_alone)
        elif record.num_draft_tokens:
            self._tree_drafts.observe(record.num_draft_tokens, record.draft_ms / 1e3)
        verify_ms = record.verifier_ms or record.forward_ms
        queue_ms = record.queue_ms if record.verifier_ms else 0.0
        if record.pipelined_hit:
            verify_ms, queue_ms = max(record.forward_ms, verify_ms - queue_ms), 0.0
        self._queues_s.append(queue_ms / 1e3)
        self._verify.observe(record.num_draft_tokens + 1, verify_ms / 1e3, is_alone)
        self._observe_sharing(record)
        self._num_rounds += 1
        if self._overheads_s and self._num_rounds % SETTINGS.rounds_a_stream_sample == 0:
            self._overheads_s.popleft()
            self._targets_s.popleft()
        if record.edge_ms is not None:
            self._edge_s.append(record.edge_ms / 1e3)
        self.observe_rtt(record.net_ms / 1e3, is_alone=is_alone)

    def observe_draft(self, seconds: float, num_tokens: int, *, is_alone: bool = True) -> None:
        """Adds drafted tokens."""
        self._estimate = None
        if num_tokens:
            self._drafts.observe(num_tokens, seconds, is_alone)

    def tree_draft_line(self) -> tuple[float, float]:
        """Returns what drafting a tree takes, (base, a node) in seconds: by a chain's token until one was drafted."""
        if self._tree_drafts.has_any:
            return self._tree_drafts.line()
        token_s = self._draft_line()[1]
        return SETTINGS.tree_base_tokens * token_s, SETTINGS.tree_node_share * token_s

    def observe_rtt(self, seconds: float, *, is_alone: bool = True) -> None:
        """Adds a round trip without the verifier's own time."""
        self._estimate = None
        self._rtts_s.append(seconds)
        if is_alone:
            self._rtts_alone_s.append(seconds)

    def _observe_sharing(self, record: RoundRecord) -> None:
        """Adds what a round's metrics tell of other sessions: nothing where the verifier does not say. The round waited
        for those in its own step, and for those of the steps that it found under way."""
        if record.num_active_sessions:
            self._sharing.append(record.num_active_sessions)
        if not record.forward_ms:
            self._shared_token_s.append(0.0)
            return
        queue_ms = 0.0 if record.pipelined_hit else record.queue_ms
        most = record.num_active_sessions or math.inf
        num_awaited = min(most, record.batch_size * (1 + queue_ms / record.forward_ms))
        is_shared = num_awaited >= SETTINGS.min_sharing_sessions
        self._shared_token_s.append(num_awaited * record.step_token_ms / 1e3 if is_shared else 0.0)

    def observe_target(self, token_s: float, num_active: int = 0) -> None:
        """Adds the time between two tokens of the target's stream, and the verifier's active sessions (0: it does not
        say)."""
        self._estimate = None
        if num_active:
            self._sharing.append(num_active)
        self._targets_s.append(token_s)
        if (step_s := self._step_s()) is not None:
            self._overheads_s.append(token_s - step_s)

    def observe_opening(self, forward_s: float, stated: StepTimes | None = None, num_active: int = 0) -> None:
        """Adds the prompt's forward, an upper bound for one token where no other session is active, what the verifier
        states of its steps, and its active sessions (0: it does not say)."""
        self._estimate = None
        if num_active:
            self._sharing.append(num_active)
        else:
            self.earlier = replace(self.earlier, num_sharing=1.0)
        self._opening_s = forward_s
        if stated and stated.are_known:
            self._stated = stated

    def estimate(self) -> tuple[ModelCosts, LinkCosts]:
        """Returns the costs, once `is_known`. A verification that was never observed takes as long as the
        target's own token."""
        if self._estimate is None:
            self._estimate = self._make_estimate()
        return self._estimate

    def _make_estimate(self) -> tuple[ModelCosts, LinkCosts]:
        line = self._line()
        target_s, share = self._target_s(self._step_s()), SETTINGS.token_share_of_target
        base_s, token_s = line or (target_s * (1 - share), target_s * share)
        call_s, draft_token_s = self._draft_line()
        models = ModelCosts(
            draft_token_s=draft_token_s,
            target_token_s=target_s,
            verify_fixed_s=base_s + token_s,
            verify_token_s=token_s,
            draft_fixed_s=self._own_s + call_s,
        )
        rtt_s = max(self._rtt_s(models.verify_s(1) + self._max_delay_s), SETTINGS.min_rtt_s)
        return models, LinkCosts(rtt_s, work_s=min(rtt_s, self._max_work_s))

    @property
    def num_sharing(self) -> float:
        """Returns how many sessions of the verifier are active, this one included, as the median of recent answers, or
        of an earlier sequence's; 1: no other."""
        return statistics.median(self._sharing) if self._sharing else self.earlier.num_sharing

    @property
    def shared_wait_s(self) -> float:
        """Returns how long a stream's request waits for the end of a step that other sessions have; 0: no other."""
        if not self.is_shared:
            return 0.0
        return SETTINGS.shared_wait_steps * self.estimate()[0].target_token_s

    @property
    def is_shared(self) -> bool:
        """Returns whether other sessions of the verifier are active."""
        return self.num_sharing >= SETTINGS.min_sharing_sessions

    @property
    def measured_rtt_s(self) -> float | None:
        """Returns the median of recent round trips that nothing overlapped; None before one."""
        return statistics.median(self._rtts_alone_s) if self._rtts_alone_s else None

    def _rtt_s(self, most_late_s: float) -> float:
        """Returns the median of recent round trips, or of those alone, of earlier sequences until there was one, where
        it is lower: by so much at most does an answer come later where drafting overlaps it."""
        earlier_s = self.earlier.rtt_s
        if earlier_s is not None and not self._rtts_s:
            return earlier_s
        recent_s, alone_s = statistics.median(self._rtts_s), self.measured_rtt_s
        if alone_s is None:
            alone_s = earlier_s
        if alone_s is None:
            alone_s = self._max_work_s or recent_s
        return min(recent_s, max(alone_s, recent_s - most_late_s))

    @property
    def stated_token_s(self) -> float:
        """Returns what one more token adds to a step, as the verifier stated it; 0: it did not."""
        return self._stated.token_s if self._stated else 0.0

    @property
    def measured_round_overhead_s(self) -> float | None:
        """Returns the median of the edge's own time in recent rounds, without drafting; None before the second one."""
        return statistics.median(self._edge_s) if self._edge_s else None

    @property
    def measured_stream_overhead_s(self) -> float | None:
        """Returns what streamed tokens took beyond a step of one token, of which the earlier sequences' counts as some
        samples; None where either is not known. It is negative where a stream's steps, which nothing separates, find
        warm caches and take less than those of rounds."""
        if not self._overheads_s:
            return None
        earlier_s = [self._usual_stream_overhead_s] * SETTINGS.stream_overhead_weight_samples
        return statistics.median((*earlier_s, *self._overheads_s))

    @property
    def _usual_stream_overhead_s(self) -> float:
        """Returns what streamed tokens of earlier sequences took beyond a step of one token, or, before any, what the
        verifier states; none where sessions share it and it states its steps, which include that."""
        if self.is_shared and self._stated is not None:
            return 0.0
        if self.earlier.stream_overhead_s is not None:
            return self.earlier.stream_overhead_s
        stated_s = self._stated.stream_gap_s if self._stated else 0.0
        return stated_s or SETTINGS.stream_overhead_s

    def _line(self, weight_tokens: float | None = None) -> tuple[float, float] | None:
        """Returns a round's line over its tokens: of rounds, or the expected one; None: neither is known.
        `weight_tokens` is that of the stated slope beside rounds.

        Where sessions share the verifier one more token delays all of them, and they all decide alike: its slope is
        then what one more token of each would add.
        """
        if not self._num_rounds:
            return self._expected_line()
        if shared_token_s := statistics.median(self._shared_token_s):
            return self._verify.recent.line_of_slope(shared_token_s)
        stated_token_s = self._stated.token_s if self._stated else None
        stated = self._stated and self._stated.alone
        return self._verify.line(lambda _: stated_token_s, stated, weight_tokens)

    def _expected_line(self) -> tuple[float, float] | None:
        """Returns the line of rounds before there was one, by what the verifier states.

        Where S sessions share its steps, and all have rounds of x tokens, a step feeds the rounds that came during the
        one before: between two rounds of a session lie two steps, which serve all others too, so 2 * fixed +
        S * (session + x * token). What the edge spends of that drafting, and the answer on its way, is not part of the
        verification.
        """
        stated, num = self._stated, self.num_sharing
        if stated is None or not self.is_shared:
            return stated and stated.alone
        fixed_s = stated.fixed_s
        if self._targets_s:
            fixed_s += max(0.0, statistics.median(self._targets_s) - stated.stream_s(num))
        call_s, draft_token_s = self._draft_line()
        away_s = call_s + self._own_s + self._rtt_s(0.0)
        shared_s = 2 * fixed_s + num * (stated.session_s + stated.token_s)
        first_s = max(fixed_s + stated.session_s + stated.token_s, shared_s - away_s)
        more_s = max(stated.token_s, num * stated.token_s - draft_token_s)
        return max(0.0, first_s - more_s), more_s

    @property
    def _own_s(self) -> float:
        """Returns the edge's own time in a round, without drafting."""
        own_s = self.measured_round_overhead_s
        return self.earlier.round_overhead_s if own_s is None else own_s

    def _draft_line(self) -> tuple[float, float]:
        """Returns a draft's line over its tokens. Until lengths differ a call is taken to have `draft_call_s` of
        its own, at most half of it; or, where that is known, a token takes what it took in earlier sequences. Where
        only trees were drafted it is theirs, and that of earlier sequences where nothing was."""
        earlier = self.earlier.draft_line
        if not self._drafts.recent.has_any:
            return self._tree_drafts.line() if self._tree_drafts.has_any else earlier or (0.0, 0.0)

        def token_s(fit: MedianSlopeTime) -> float:
            if earlier is not None:
                return min(earlier[1], fit.median_s / fit.mean_tokens)
            return (fit.median_s - min(SETTINGS.draft_call_s, fit.median_s / 2)) / fit.mean_tokens

        return self._drafts.line(token_s)

    def _step_s(self) -> float | None:
        """Returns the verifier's step of one token, and of one of each session that shares it; None until it stated
        one, or lengths differed. A round that comes while a step is computed waits for its end, which a stream never
        does: its next token is in every step.

        Rounds are of more tokens: where their times vary, their slope says little of one token, so what the verifier
        states of it counts for more than in the line of rounds."""
        if self._stated is not None and self.is_shared:
            return self._stated.stream_s(self.num_sharing)
        line = self._line(SETTINGS.stated_weight_tokens)
        if line is None or (self._stated is None and not self._verify.recent.is_sloped):
            return None
        queue_s = statistics.median(self._queues_s) if self._queues_s else 0.0
        return max(0.0, sum(line) - queue_s)

    def _target_s(self, step_s: float | None) -> float:
        """Returns a token's time of the target alone: a stream's, or a step's of one token and what a stream takes
        beside it. Until a step is known it is bounded by the opening's prompt and by a verification.

        A known step counts among a stream's times as one: the first of them come slowly.
        """
        overhead_s = self.measured_stream_overhead_s
        if overhead_s is None:
            overhead_s = self._usual_stream_overhead_s
        if self._targets_s:
            expected_s = () if step_s is None else (step_s + overhead_s,)
            return float(statistics.median((*self._targets_s, *expected_s)))
        known_s = [] if self._opening_s is None else [self._opening_s]
        if step_s is not None:
            known_s = [step_s] if self._num_rounds or self.is_shared else [*known_s, step_s]
        elif self._num_rounds:
            known_s.append(self._verify.recent.median_s)
        base_s = min(known_s, default=0.0)
        least_s = SETTINGS.min_stream_share * base_s
        return max(least_s, base_s + min(overhead_s, SETTINGS.max_stream_overhead_s))
