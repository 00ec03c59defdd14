"""What a decoder measured: acceptance, times, and the speed-up against the target alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from outrider.edge_client.core.stats import RoundRecord, SessionStats


@dataclass(slots=True)
class Counts:
    """Counts what was drafted and accepted; corrections and bonus tokens are neither."""

    num_steps: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, stats: SessionStats, num_tokens: int) -> None:
        """Adds a generation."""
        answered = [each for each in stats.rounds if each.is_answered]
        pairs = [accepted_of_drafted(each) for each in answered]
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_rounds += len(answered)
        self.num_accepted += sum(accepted for accepted, _ in pairs)
        self.num_drafted += sum(drafted for _, drafted in pairs)

    @property
    def acceptance_rate(self) -> float:
        """Returns accepted / drafted tokens; NaN where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan


def accepted_of_drafted(record: RoundRecord) -> tuple[int, int]:
    """Returns how many tokens of a round were accepted of how many: of a tree those of its likeliest path, where that
    is known, else of all nodes."""
    accepted, drafted = record.as_chain
    return (accepted, drafted) if drafted else (record.num_accepted_tokens, record.num_draft_tokens)


def draft_latency_s(rounds: Iterable[RoundRecord]) -> float:
    """Returns the mean seconds that a draft took; NaN where nothing was drafted."""
    return _mean(each.draft_ms for each in rounds if each.num_draft_tokens) / 1e3


def verify_latency_s(rounds: Iterable[RoundRecord]) -> float:
    """Returns the mean seconds from sending a round to its verdict, or of the forward where the verifier drafts too;
    NaN without rounds."""
    return _mean(each.rtt_ms or each.queue_ms + each.forward_ms for each in rounds if each.is_answered) / 1e3


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return fmean(kept) if kept else math.nan
