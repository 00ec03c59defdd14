"""What the runs of a point come to: half of them choose the best setting, the other half compare. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.real.cases import AGAIN, DEFAULT, Comparison

MAX_A_A_ERROR = 0.02  # of the point that a worst ratio is read at ...
MAX_RERUNS = 2  # ... which is measured again at most so often
# A case slower than the fastest by this decides nothing: more runs of it would tell nothing.
SLOW_RATIO, EARLY_SLOW_RATIO = 1.25, 1.6
NUM_EARLY_TURNS = 2

Runs = Mapping[str, Mapping[int, float]]
"""Milliseconds a token, by case and turn. Cases of one turn write the same text."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds a comparison's result: the subject's tokens a second : those of `chosen`, the fastest of the others."""

    ratio: float
    chosen: str


def is_choosing(turn: int) -> bool:
    """Returns whether a turn's runs choose: every second one does, so that drift reaches both halves alike."""
    return turn % 2 == 0


def judge(runs: Runs, comparison: Comparison) -> Outcome:
    """Returns the result of a comparison. Where nothing is to be chosen all runs compare; what was left out of later
    turns is not chosen."""
    turns = sorted({turn for name in comparison.subject for turn in runs[name]})
    if len(comparison.others) == 1:
        (chosen,) = comparison.others
        return Outcome(_ratio(runs, comparison.subject, chosen, turns), chosen)
    choosing = [turn for turn in turns if is_choosing(turn)]
    most = max(len(runs[name]) for name in comparison.others)
    stayed = [name for name in comparison.others if len(runs[name]) == most]
    chosen = min(stayed, key=lambda name: _ratio(runs, comparison.subject, name, choosing))
    comparing = [turn for turn in turns if not is_choosing(turn)]
    return Outcome(_ratio(runs, comparison.subject, chosen, comparing), chosen)


def a_a_ratio(runs: Runs) -> float:
    """Returns the default against itself, in the turns that compare."""
    return _ratio(runs, (DEFAULT.name,), AGAIN.name, [t for t in runs[DEFAULT.name] if not is_choosing(t)])


def _ratio(runs: Runs, subject: Sequence[str], other: str, turns: Iterable[int]) -> float:
    """Returns the other's time : the subject's, the geometric mean over turns without the highest and the lowest
    quarter: a moment in which the machine was busy decides nothing."""
    logs = sorted(
        math.log(runs[other][turn] / statistics.fmean(runs[name][turn] for name in subject))
        for turn in turns
        if turn in runs[other]
    )
    cut = len(logs) // 4
    return math.exp(statistics.fmean(logs[cut : len(logs) - cut]))


def still_needed(runs: Runs, compared: Sequence[Comparison]) -> set[str]:
    """Returns the cases whose further runs may change a comparison: the subjects, and what is nearly as fast as the
    fastest that it is compared with."""
    needed = {name for comparison in compared for name in comparison.subject}
    for comparison in compared:
        turns = [*runs[comparison.subject[0]]]
        slow_ratio = EARLY_SLOW_RATIO if len(turns) <= NUM_EARLY_TURNS else SLOW_RATIO
        against = {name: _ratio(runs, comparison.subject, name, turns) for name in comparison.others}
        fastest = min(1.0, *against.values())
        needed |= {name for name, ratio in against.items() if ratio <= slow_ratio * fastest}
    return needed


@dataclass(frozen=True, slots=True)
class JudgedPoint:
    """Holds what a point's reruns are decided by: its ratios by measure."""

    number: int
    ratios: Mapping[str, float]
    a_a: float
    num_reruns: int


def next_rerun(points: Sequence[JudgedPoint]) -> int | None:
    """Returns the number of a point to measure again: one with the worst ratio of some measure, whose A/A ratio is
    further from 1 than MAX_A_A_ERROR. None where there is none, or each was measured again often enough."""
    for measure in dict.fromkeys(name for point in points for name in point.ratios):
        worst = min((p for p in points if measure in p.ratios), key=lambda p: p.ratios[measure])
        if abs(worst.a_a - 1) > MAX_A_A_ERROR and worst.num_reruns < MAX_RERUNS:
            return worst.number
    return None
