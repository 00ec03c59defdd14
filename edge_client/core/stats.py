"""The statistics of a session: one record a round, and the summary that `--json` prints. Does no I/O."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.common.sequences import acceptance_by_position
from outrider.common.types import Origin, TokenIds

_NS_PER_MS = 1e6


class RoundOutcome(enum.StrEnum):
    """Says how a round ended."""

    ANSWERED = "answered"
    TIMED_OUT = "timed_out"  # no answer came by its deadline
    DISCARDED = "discarded"  # sent ahead on an assumption that turned out wrong: nobody waited for its answer
    KEPT = "kept"  # no round: a draft that a commit-gate kept without asking


@dataclass(slots=True)  # frozen would take a round 5 µs more
class RoundRecord:
    """Measures one round, whatever its outcome. `net_ms` is the wait without the verifier's own time.

    A co-located round crosses no network: its `rtt_ms` stays 0, which means not measured.
    """

    round_id: int
    num_draft_tokens: int
    num_accepted_tokens: int = 0
    has_no_proposal: bool = False  # a draft was wanted, and the strategy had none
    draft_ms: float = 0.0
    edge_ms: float | None = (
        None  # from the answer before to its sending, without drafting; None: not measured
    )
    since_ms: float | None = None  # from the answer before to its own; None: not measured
    rtt_ms: float = 0.0
    net_ms: float = 0.0
    queue_ms: float = 0.0
    forward_ms: float = 0.0
    verifier_ms: float = 0.0
    batch_size: int = 0  # sessions in its forward; 0 where the verifier hides it
    num_active_sessions: int = (
        0  # answered within the last second; 0 where the verifier hides it, or is older
    )
    # What a token added to the verifier's steps then, as it says; 0: it does not know.
    step_token_ms: float = 0.0
    alpha_mean: float = float("nan")
    bytes_up: int = 0
    bytes_down: int = 0
    outcome: RoundOutcome = RoundOutcome.ANSWERED
    confidences: tuple[float, ...] = ()  # the draft's probability of each drafted token
    window: int = 1  # rounds that were allowed in flight when this one was sent
    pipelined_hit: bool | None = None  # whether its assumption was right; None: it assumed nothing
    is_guess_hit: bool = False  # it assumed a correction, which came
    # Its first token was not the bonus of the round before, all of which was accepted.
    is_first_wrong: bool = False
    # With a gate.
    num_dropped_tokens: int = 0  # drafted and doubted by the gate, so not sent
    hard_ratio: float | None = None  # share of the drafted tokens that are hard
    escalated: bool | None = None  # whether the gate asked for the target
    main_path: tuple[int, int] | None = None  # of a tree: tokens of its likeliest path, accepted and drafted

    @property
    def is_answered(self) -> bool:
        """Returns whether its verdict was applied."""
        return self.outcome is RoundOutcome.ANSWERED

    @property
    def as_chain(self) -> tuple[int, int]:
        """Returns how many tokens were accepted of how many of one chain: of a tree its likeliest path."""
        return self.main_path or (self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def judged_tokens(self) -> tuple[int, int]:
        """Returns how many tokens of that chain were accepted and rejected: at most one is rejected, since what is
        drafted after it is not judged."""
        num_accepted, num_drafted = self.as_chain
        return num_accepted, int(num_accepted < num_drafted)

    @property
    def la_over_k(self) -> float:
        """Returns accepted / drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class JudgedTree:
    """Holds a tree and its verdict, to be shown."""

    token_ids: TokenIds
    parents: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    next_token: int | None  # the target's own after them; None where the text ended before one


@dataclass(frozen=True, slots=True)
class Stretch:
    """Says which mode made the text from its new token `start` on, and why: `reason` is "given" by an option,
    "first" as long as nothing is known, "fastest" by `expected_ms`, what a token was expected to take in each mode,
    "stream_lost" where cloud-only's stream broke, or "draft_full" at the end of the draft's context."""

    mode: str
    start: int
    expected_ms: dict[str, float]
    reason: str


@dataclass(slots=True)
class SessionStats:
    """The statistics of one session; times are by its clock, in ns."""

    rounds: list[RoundRecord] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    last_tree: JudgedTree | None = None  # of the last answered round; None: it was a chain
    token_times_ns: list[int] = field(default_factory=list)
    start_ns: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    open_ms: float = 0.0
    # Of the verifier's steps, as it stated when the session opened; 0: nothing yet.
    step_fixed_s: float = 0.0
    step_session_s: float = 0.0  # beside its tokens
    step_token_s: float = 0.0
    num_generate_tokens: int = 0  # streamed by `Generate`
    generate_forward_ms: list[float] = field(default_factory=list)
    generate_batch_sizes: list[int] = field(default_factory=list)  # sessions in each of those forwards
    num_timeouts: int = 0
    num_rebuilds: int = 0
    num_reconnects: int = 0
    num_refusals: int = 0
    num_late_verdicts: int = 0
    num_stale_rounds: int = 0  # sent after a round that was not accepted as a whole
    num_wasted_draft_tokens: int = 0  # drafted for such rounds, sent or not
    num_guessed_rounds: int = 0  # sent on a predicted correction; never counted as stale
    num_guess_hits: int = 0  # rounds that were judged because a predicted correction came
    num_marks_cleared: int = 0
    num_reverified_tokens: int = 0  # kept unverified, and then confirmed by the target
    num_rolled_back_tokens: int = 0  # dropped because one of them was not
    num_learned_tokens: int = 0  # whose log-probabilities the draft's head was shown
    learn_bytes_down: int = 0  # of their log-probabilities, part of `bytes_down`
    draft_load_ms: float = 0.0
    mc_dropout_ms: float | None = None  # of each drafted token, where the draft reports variance
    mc_dropout_ratio: float | None = None  # a drafted token with it : without

    def summary(self, origins: Sequence[Origin]) -> dict[str, object]:
        """Returns the figures as JSON. `origins` are the new tokens'. Times are means in ms over answered rounds;
        None: not measured. Acceptance is that of chains, and of the likeliest paths of trees."""
        answered = [r for r in self.rounds if r.is_answered]
        drafted = sum(r.num_draft_tokens for r in answered)
        accepted = sum(r.num_accepted_tokens for r in answered)
        chains = [r.as_chain for r in answered]
        in_rounds = sum(o in (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS) for o in origins)
        times = self.token_times_ns
        return {
            "num_tokens": len(origins),
            "stretches": self._stretches(len(origins)),
            "num_rounds": len(answered),
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": _ratio(sum(a for a, _ in chains), sum(n for _, n in chains)),
            "num_tree_rounds": sum(r.main_path is not None for r in answered),
            "acceptance_per_position": acceptance_per_position(answered),
            "tokens_per_round": _ratio(in_rounds, len(answered)),
            "draft_length": draft_length(answered),
            "alpha_mean": _alpha(answered),
            "ttft_ms": _ms(times[0] - self.start_ns) if times else None,
            "tpot_ms": _ms((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else None,
            "total_ms": _ms(times[-1] - self.start_ns) if times else None,
            "tokens_per_s": _rate(times),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "num_learned_tokens": self.num_learned_tokens,
            "learn_bytes_down": self.learn_bytes_down,
            "bytes_up_per_draft_token": _ratio(sum(r.bytes_up for r in answered), drafted),
            "num_fallback_tokens": sum(o is Origin.FALLBACK for o in origins),
            "num_edge_only_tokens": sum(o is Origin.EDGE_ONLY for o in origins),
            "num_gate_tokens": sum(o is Origin.GATE for o in origins),
            "num_kept_blocks": sum(r.outcome is RoundOutcome.KEPT for r in self.rounds),
            "num_escalations": sum(r.escalated is True for r in self.rounds),
            "hard_ratio": _hard_ratio(self.rounds),
            "verifier_calls_per_token": _ratio(len(answered) + len(self.generate_forward_ms), len(origins)),
            "num_stale_rounds": self.num_stale_rounds,
            "num_wasted_draft_tokens": self.num_wasted_draft_tokens,
            "num_guessed_rounds": self.num_guessed_rounds,
            "num_guess_hits": self.num_guess_hits,
            "pipelined_hit_rate": _hit_rate(self.rounds),
            "num_timeouts": self.num_timeouts,
            "num_rebuilds": self.num_rebuilds,
            "num_reconnects": self.num_reconnects,
            "num_refusals": self.num_refusals,
            "num_late_verdicts": self.num_late_verdicts,
            "num_marks_cleared": self.num_marks_cleared,
            "num_reverified_tokens": self.num_reverified_tokens,
            "num_rolled_back_tokens": self.num_rolled_back_tokens,
            "open_ms": round(self.open_ms, 3),
            "draft_ms": _mean(r.draft_ms for r in self.rounds if r.num_draft_tokens),
            "draft_ms_per_token": _per_token(self.rounds),
            "mc_dropout_ms": self.mc_dropout_ms,
            "mc_dropout_ratio": self.mc_dropout_ratio,
            "rtt_ms": _mean(r.rtt_ms for r in answered if r.rtt_ms),
            "net_ms": _mean(r.net_ms for r in answered if r.rtt_ms),
            "queue_ms": _mean(r.queue_ms for r in answered),
            "forward_ms": _mean([*(r.forward_ms for r in answered), *self.generate_forward_ms]),
        }

    def _stretches(self, num_tokens: int) -> list[dict[str, object]]:
        """Returns the mode, the number of tokens, the reason and the expected times of each stretch that has tokens."""
        if not self.stretches:
            return []
        ends = [*(each.start for each in self.stretches[1:]), num_tokens]
        counts = [min(end, num_tokens) - each.start for each, end in zip(self.stretches, ends, strict=True)]
        return [
            {"mode": each.mode, "num_tokens": count, "reason": each.reason, "expected_ms": each.expected_ms}
            for each, count in zip(self.stretches, counts, strict=True)
            if count > 0
        ]


def _hard_ratio(rounds: Sequence[RoundRecord]) -> float | None:
    """Returns the share of hard tokens among those that a gate judged."""
    judged = [r for r in rounds if r.hard_ratio is not None]
    counts = [(r.hard_ratio or 0.0, r.num_draft_tokens + r.num_dropped_tokens) for r in judged]
    return _ratio(sum(share * number for share, number in counts), sum(number for _, number in counts))


def _hit_rate(rounds: Sequence[RoundRecord]) -> float | None:
    """Returns the share of the rounds sent ahead that were judged."""
    ahead = [r.pipelined_hit for r in rounds if r.pipelined_hit is not None]
    return _ratio(sum(ahead), len(ahead))


def acceptance_per_position(rounds: Sequence[RoundRecord]) -> list[float]:
    """Returns, for each i, how often the i-th draft token was accepted, of the rounds that had one."""
    counts = acceptance_by_position(r.as_chain for r in rounds)
    return [round(each.accepted / each.drafted, 4) for each in counts]


def draft_length(rounds: Sequence[RoundRecord]) -> dict[str, float] | None:
    """Returns the mean and quantiles of the number of drafted tokens, of the rounds that drafted."""
    lengths = sorted(r.num_draft_tokens for r in rounds if r.num_draft_tokens)
    if not lengths:
        return None
    quantiles = {
        f"p{percent}": float(lengths[percent * (len(lengths) - 1) // 100]) for percent in (10, 50, 90)
    }
    return {"mean": round(statistics.fmean(lengths), 2), **quantiles, "max": float(lengths[-1])}


def _alpha(rounds: Sequence[RoundRecord]) -> float | None:
    judged = [r.alpha_mean for r in rounds if r.alpha_mean == r.alpha_mean and r.num_draft_tokens]
    return round(statistics.fmean(judged), 4) if judged else None


def _per_token(rounds: Sequence[RoundRecord]) -> float | None:
    drafted = sum(r.num_draft_tokens + r.num_dropped_tokens for r in rounds)
    return round(sum(r.draft_ms for r in rounds) / drafted, 4) if drafted else None


def _rate(times_ns: Sequence[int]) -> float | None:
    """Returns tokens per second after the first."""
    if len(times_ns) < 2 or times_ns[-1] == times_ns[0]:
        return None
    return round((len(times_ns) - 1) / ((times_ns[-1] - times_ns[0]) / 1e9), 2)


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return round(statistics.fmean(values), 3) if values else None


def _ms(ns: float) -> float:
    return round(ns / _NS_PER_MS, 3)
