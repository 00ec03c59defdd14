"""Sums up the answers of a load run as figures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from outrider.experiments.shared.verifier_metrics import MemoryPeaks

MAX_EXAMPLES = 5
GAP_SHARE = 0.95


class RoundSample(NamedTuple):
    """Holds one answer's times: seconds on the client's clock, nanoseconds from the verifier's metrics. A message
    of a stream is one too; its latency is the time since the one before."""

    end_s: float
    latency_s: float
    forward_ns: int
    queue_ns: int
    total_ns: int
    batch_size: int
    session: int = 0
    num_tokens: int = 0  # that it committed
    num_draft_tokens: int = 0


class Refusal(NamedTuple):
    """Holds when a round was refused, and when to try again."""

    end_s: float
    latency_s: float
    retry_after_ms: int


@dataclass
class Tally:
    """Collects what every stream of a run sees; `since_s` cuts the warm-up off."""

    rounds: list[RoundSample] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)  # open loop: how late a round was sent
    errors: Counter[str] = field(default_factory=Counter)
    num_mismatches: int = 0
    mismatches: list[str] = field(default_factory=list)  # the first few, in words
    num_unsent: int = 0  # open loop: arrivals that found no free session
    num_hung: int = 0
    _num_sessions: int = 0

    def next_session(self) -> int:
        """Returns the number of one more session, which its samples carry."""
        self._num_sessions += 1
        return self._num_sessions

    def note_mismatch(self, text: str) -> None:
        """Counts a verdict that is not the recorded one, and keeps the first few."""
        self.num_mismatches += 1
        if len(self.mismatches) < MAX_EXAMPLES:
            self.mismatches.append(text)

    def report(self, since_s: float, until_s: float, deadline_s: float) -> LoadReport:
        """Returns the figures of what was answered in the window."""
        rounds = [r for r in self.rounds if since_s <= r.end_s < until_s]
        refusals = [r for r in self.refusals if since_s <= r.end_s < until_s]
        seconds = until_s - since_s
        latencies = sorted(r.latency_s for r in rounds)
        in_time = sum(latency <= deadline_s for latency in latencies)
        num_tokens = sum(r.num_tokens for r in rounds)
        gaps_ms = session_gaps_ms(rounds)
        return LoadReport(
            num_tokens=num_tokens,
            tokens_per_s=round(num_tokens / seconds, 2),
            tokens_per_round=round(num_tokens / len(rounds), 4) if rounds else 0.0,
            mean_drafted=round(sum(r.num_draft_tokens for r in rounds) / len(rounds), 3) if rounds else 0.0,
            commit_gap_p95_ms=percentile_ms(sorted(gap / 1e3 for gap in gaps_ms), 0.5),
            worst_commit_gap_p95_ms=max(gaps_ms, default=0.0),
            seconds=round(seconds, 3),
            num_rounds=len(rounds),
            rounds_per_s=round(len(rounds) / seconds, 2),
            goodput=round(in_time / seconds, 2),
            p50_ms=percentile_ms(latencies, 0.50),
            p99_ms=percentile_ms(latencies, 0.99),
            max_ms=percentile_ms(latencies, 1.0),
            beyond_forward_ms=percentile_ms(sorted(r.latency_s - r.forward_ns / 1e9 for r in rounds), 0.5),
            queue_p50_ms=percentile_ms(sorted(r.queue_ns / 1e9 for r in rounds), 0.5),
            mean_batch=round(sum(r.batch_size for r in rounds) / len(rounds), 2) if rounds else 0.0,
            num_refused=len(refusals),
            refused_p99_ms=percentile_ms(sorted(r.latency_s for r in refusals), 0.99),
            num_refused_without_hint=sum(r.retry_after_ms <= 0 for r in refusals),
            lag_p99_ms=percentile_ms(sorted(self.lags_s), 0.99),
            num_unsent=self.num_unsent,
            num_hung=self.num_hung,
            num_mismatches=self.num_mismatches,
            mismatches=list(self.mismatches),
            errors=dict(self.errors),
        )


@dataclass(frozen=True)
class LoadReport:
    """Holds rates a second and times in ms as the client saw them; 0.0 where there was nothing to measure."""

    seconds: float
    num_rounds: int
    rounds_per_s: float
    goodput: float  # verified rounds answered within the deadline, a second
    p50_ms: float
    p99_ms: float
    max_ms: float
    beyond_forward_ms: float  # median of latency less the verifier's own forward time
    queue_p50_ms: float
    mean_batch: float
    num_refused: int
    refused_p99_ms: float
    num_refused_without_hint: int
    lag_p99_ms: float
    num_unsent: int
    num_hung: int
    num_mismatches: int
    mismatches: list[str]
    errors: dict[str, int]
    num_tokens: int  # committed
    tokens_per_s: float
    tokens_per_round: float
    mean_drafted: float
    commit_gap_p95_ms: (
        float  # of each session's times between answers with tokens the p95; of these the median ...
    )
    worst_commit_gap_p95_ms: float  # ... and the largest
    memory: MemoryPeaks | None = None  # of the verifier, where its admin port is known

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LoadReport:
        """Returns the report that `dataclasses.asdict` made a record of."""
        memory = record.get("memory")
        return cls(**{**record, "memory": None if memory is None else MemoryPeaks(**memory)})

    @property
    def is_right(self) -> bool:
        """Returns whether every verdict was the recorded one, and nothing failed or hung."""
        return not (self.num_mismatches or self.num_hung or self.errors)

    def lines(self) -> list[str]:
        """Returns the report for a person."""
        text = [
            f"{self.num_rounds} rounds in {self.seconds:g} s: {self.rounds_per_s:g} a second, "
            f"{self.goodput:g} in time; batches of {self.mean_batch:g}",
            f"latency p50 {self.p50_ms:g}, p99 {self.p99_ms:g}, max {self.max_ms:g} ms; "
            f"beyond the forward {self.beyond_forward_ms:g} ms",
            f"{self.tokens_per_s:g} tokens a second, {self.tokens_per_round:g} a round of {self.mean_drafted:g} "
            f"drafted; p95 between a session's answers {self.commit_gap_p95_ms:g} ms, "
            f"worst session {self.worst_commit_gap_p95_ms:g}",
            f"refused {self.num_refused} (p99 {self.refused_p99_ms:g} ms, "
            f"{self.num_refused_without_hint} without a retry hint), hung {self.num_hung}",
            f"verdicts unlike the recording: {self.num_mismatches}",
        ]
        if self.memory is not None:
            text.append(self.memory.line)
        return [*text, *self.mismatches, *(f"error {name}: {count}" for name, count in self.errors.items())]


def session_gaps_ms(rounds: Sequence[RoundSample]) -> list[float]:
    """Returns for each session that had several answers with tokens the p95 of the times between them."""
    ends: dict[int, list[float]] = defaultdict(list)
    for each in rounds:
        if each.num_tokens:
            ends[each.session].append(each.end_s)
    gaps = [sorted(after - before for before, after in pairwise(times)) for times in ends.values()]
    return [percentile_ms(each, GAP_SHARE) for each in gaps if each]


def percentile_ms(ordered_s: Sequence[float], share: float) -> float:
    """Returns the nearest rank of ascending seconds, in milliseconds."""
    if not ordered_s:
        return 0.0
    return round(1e3 * ordered_s[max(0, math.ceil(share * len(ordered_s)) - 1)], 4)
