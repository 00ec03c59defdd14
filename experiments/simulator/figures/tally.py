"""Adds up the answers to one group of edges as its requests end. Tallies of parts of a system add up too."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.common.types import Origin
from outrider.experiments.simulator.parts.edges import RequestLog

PATIENCE_S = 5.0  # a first token later than this is no service
_OF_ROUNDS = (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS)
_UNVERIFIED = (Origin.FALLBACK, Origin.EDGE_ONLY)


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """Adds up requests after the warm-up; those count that began after it. Times in seconds, in no order
    that matters."""

    warmup_s: float
    counts: Counter[str] = field(default_factory=Counter)
    ttfts_s: array[float] = field(default_factory=_seconds)
    tpots_s: array[float] = field(default_factory=_seconds)  # of finished requests
    gaps_s: array[float] = field(default_factory=_seconds)  # between commits

    def add(self, log: RequestLog) -> None:
        """Adds a request that ended, or that the end of the world cut off."""
        counts, warmup_s = self.counts, self.warmup_s
        counts["tokens"] += sum(num_tokens for at_s, num_tokens in log.commits if at_s >= warmup_s)
        counts["starved"] += _is_starved(log)
        self.gaps_s.extend(
            at_s - before_s for (before_s, _), (at_s, _) in pairwise(log.commits) if at_s >= warmup_s
        )
        if log.start_s < warmup_s:
            return
        counts["requests"] += 1
        counts["failed"] += bool(log.error)
        if log.ttft_s is not None:
            self.ttfts_s.append(log.ttft_s)
        if log.is_finished:
            self._add_finished(log)
        if log.result is not None:
            self._add_stats(log)

    def _add_finished(self, log: RequestLog) -> None:
        assert log.result is not None, "a finished request has a result"
        self.counts["finished"] += 1
        self.counts["finished_tokens"] += log.num_tokens
        self.counts["bytes_up"] += log.result.stats.bytes_up
        self.counts["bytes_down"] += log.result.stats.bytes_down
        if log.tpot_s is not None:
            self.tpots_s.append(log.tpot_s)

    def _add_stats(self, log: RequestLog) -> None:
        assert log.result is not None, "asked for before"
        counts, stats = self.counts, log.result.stats
        for each in stats.rounds:
            if each.is_answered:
                counts["rounds"] += 1
                counts["draft_tokens"] += each.num_draft_tokens
                counts["accepted_tokens"] += each.num_accepted_tokens
                counts["tree_rounds"] += each.main_path is not None
        counts["timeouts"] += stats.num_timeouts
        counts["refusals"] += stats.num_refusals
        counts["round_tokens"] += sum(origin in _OF_ROUNDS for origin in log.result.origins)
        counts["unverified_tokens"] += sum(origin in _UNVERIFIED for origin in log.result.origins)

    def merge(self, other: Tally) -> None:
        """Adds another tally."""
        self.counts.update(other.counts)
        self.ttfts_s.extend(other.ttfts_s)
        self.tpots_s.extend(other.tpots_s)
        self.gaps_s.extend(other.gaps_s)


def total(tallies: Iterable[Tally], warmup_s: float) -> Tally:
    """Returns the sum of tallies."""
    everybody = Tally(warmup_s)
    for tally in tallies:
        everybody.merge(tally)
    return everybody


def _is_starved(log: RequestLog) -> bool:
    waited_s = (log.commits[0][0] if log.commits else log.end_s) - log.start_s
    return waited_s > PATIENCE_S or bool(log.error and not log.commits)
