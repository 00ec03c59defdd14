"""How many edges of a mixture a system's verifiers serve at an objective: twice as many until it fails, then
halves between."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from outrider.common.config.units import parse_duration
from outrider.common.errors import UsageError
from outrider.experiments.simulator.config import System
from outrider.experiments.simulator.figures.outcome import Quantiles, SystemFigures, figures_of
from outrider.experiments.simulator.shards import play_parts

MAX_EDGES = 100_000
RESOLUTION = 0.02  # of the answer
MAX_UNSERVED = 0.01  # of edges: where verifiers refuse many, those that they serve are served well
_OBJECTIVE = re.compile(r"(p50|p95|p99|mean)_(ttft|tpot|commit_gap)\s*[=<]=?\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Objective:
    """Is met where `quantile` of `figure` over all edges is at most `limit_ms`, and next to nobody is left
    waiting."""

    quantile: str
    figure: str
    limit_ms: float

    def value_ms(self, outcome: SystemFigures) -> float | None:
        """Returns the figure; None where there is none."""
        quantiles: Quantiles = getattr(outcome.total, f"{self.figure}_ms")
        value: float | None = getattr(quantiles, self.quantile)
        return value

    def is_met(self, outcome: SystemFigures) -> bool:
        """Returns whether the outcome meets it."""
        value_ms, total = self.value_ms(outcome), outcome.total
        num_unserved = max(total.num_starved, total.num_failed)
        if value_ms is None or num_unserved > MAX_UNSERVED * total.num_edges:
            return False
        return value_ms <= self.limit_ms

    def __str__(self) -> str:
        return f"{self.quantile} {self.figure.replace('_', ' ')} <= {self.limit_ms:g} ms"


def parse_objective(text: str) -> Objective:
    """Returns the objective of "p95_commit_gap=250ms". Raises `UsageError`."""
    match = _OBJECTIVE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--find-capacity {text}: want a figure and its limit: p50, p95, p99 or mean, then _ttft, _tpot "
            "or _commit_gap: p95_commit_gap=250ms"
        )
    return Objective(match[1], match[2], 1e3 * parse_duration(match[3], "--find-capacity"))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Holds what was found. `num_edges` of 0: not even the fewest. `outcome` is theirs, `missed` of the
    fewest too many."""

    num_edges: int
    outcome: SystemFigures | None
    too_many: int | None
    missed: SystemFigures | None


def find_capacity(
    system: System, objective: Objective, on_trial: Callable[[int, SystemFigures, bool], None] | None = None
) -> Capacity:
    """Returns the largest number found to meet the objective: more edges are taken to be slower, as they
    share verifiers."""

    def trial(num_edges: int) -> tuple[SystemFigures, bool]:
        outcome = figures_of(play_parts(system.with_edges(num_edges)))
        is_met = objective.is_met(outcome)
        if on_trial is not None:
            on_trial(outcome.total.num_edges, outcome, is_met)
        return outcome, is_met

    good, most = 0, None
    good_outcome: SystemFigures | None = None
    bad_outcome: SystemFigures | None = None
    num_edges = len(system.edges)
    while most is None and num_edges <= MAX_EDGES:
        outcome, is_met = trial(num_edges)
        if is_met:
            good, good_outcome, num_edges = num_edges, outcome, 2 * num_edges
        else:
            most, bad_outcome = num_edges, outcome
    while most is not None and good and most - good > max(len(system.edges), RESOLUTION * good):
        middle = (good + most) // 2
        outcome, is_met = trial(middle)
        if is_met:
            good, good_outcome = middle, outcome
        else:
            most, bad_outcome = middle, outcome
    return Capacity(good, good_outcome, most, bad_outcome)
