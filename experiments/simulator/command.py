"""`python -m outrider.experiments.simulator SYSTEM.yaml`: plays a system of edges and verifiers in virtual time.

python -m outrider.experiments.simulator experiments/simulator/systems/small.yaml
python -m outrider.experiments.simulator SYSTEM.yaml --json --seed 7
python -m outrider.experiments.simulator SYSTEM.yaml --find-capacity p95_commit_gap=250ms
python -m outrider.experiments.simulator SYSTEM.yaml --out DIR         a results folder as `edge-client bench` has
python -m outrider.experiments.simulator --sweep SWEEP.yaml --out DIR  a sweep of `edge-client bench`, simulated
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.common.config.units import parse_duration
from outrider.common.errors import UsageError
from outrider.experiments.simulator.config import System, load_system
from outrider.experiments.simulator.figures.outcome import Quantiles, SystemFigures, figures_of, table
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

    def played(outcome: SystemFigures | None) -> int | None:
        return None if outcome is None else outcome.total.num_edges  # each group has one at least

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
    return Capacity(played(good_outcome) or 0, good_outcome, played(bad_outcome), bad_outcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    arguments = _parse(argv)
    _check(arguments)
    if arguments.sweep is not None:
        return _sweep(arguments)
    changes = {name: value for name in ("seconds", "seed") if (value := getattr(arguments, name)) is not None}
    system = load_system(arguments.system, **changes)
    if arguments.edges is not None:
        system = system.with_edges(arguments.edges)
    if arguments.find_capacity:
        return _find_capacity(system, arguments.find_capacity, arguments.json)
    progress = _Progress(system.config.seconds, is_silent=arguments.json)
    if arguments.out is not None:
        from outrider.experiments.simulator.figures.folder import play_into

        outcome, wall_s = play_into(system, arguments.out, progress)
    else:
        played = play_parts(system, progress)
        outcome, wall_s = figures_of(played), played.wall_s
    progress.end()
    print(json.dumps(outcome.as_json(), indent=1) if arguments.json else table(outcome))
    if not arguments.json:
        a_round = f", {1e6 * wall_s / n:.0f} us a round" if (n := outcome.total.num_rounds) else ""
        print(f"\nplayed in {wall_s:.1f} s{a_round}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("system", nargs="?", type=Path, metavar="SYSTEM.yaml", help="what to play")
    parser.add_argument("--sweep", type=Path, metavar="SWEEP.yaml", help="a sweep instead; needs --out")
    parser.add_argument("--seconds", type=float, metavar="S", help="of virtual time, instead of the file's")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the file's")
    parser.add_argument("--edges", type=int, metavar="N", help="so many, in the file's proportions")
    parser.add_argument("--find-capacity", metavar="GOAL", help="most edges that meet p95_commit_gap=250ms")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a results folder")
    parser.add_argument("--json", action="store_true", help="figures as JSON; no table, no progress")
    return parser.parse_args(argv)


def _check(arguments: argparse.Namespace) -> None:
    """Raises `UsageError` naming the first argument that is missing, wrong or would have no effect."""
    if arguments.sweep is None and arguments.system is None:
        raise UsageError("no system given; docs/simulator.md has an example")
    if arguments.edges is not None and arguments.edges < 1:
        raise UsageError(f"--edges {arguments.edges}: want at least 1")
    way = "--find-capacity"
    without: tuple[str, ...] = ("edges", "out")
    if arguments.sweep is not None:
        way, without = "--sweep", ("system", "seconds", "seed", "edges", "find_capacity", "json")
    elif not arguments.find_capacity:
        return
    for name in without:
        if (value := getattr(arguments, name)) is not None and value is not False:
            flag = "SYSTEM.yaml" if name == "system" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with {way}; leave one of them out")


def _find_capacity(system: System, goal: str, is_json: bool) -> int:
    from outrider.experiments.simulator.command import find_capacity, parse_objective

    objective = parse_objective(goal)

    def tell(num_edges: int, outcome: SystemFigures, is_met: bool) -> None:
        value_ms = objective.value_ms(outcome)
        shown = "no answers" if value_ms is None else f"{value_ms:.1f} ms"
        shown += f", {outcome.total.num_starved} starved" if outcome.total.num_starved else ""
        print(f"{num_edges} edges: {shown}, {'met' if is_met else 'missed'}", file=sys.stderr)

    found = find_capacity(system, objective, tell)
    if is_json:
        outcome = found.outcome.as_json() if found.outcome is not None else None
        print(json.dumps({"num_edges": found.num_edges, "objective": str(objective), "outcome": outcome}))
        return 0
    too_many = f"; {found.too_many} do not" if found.too_many else ""
    print(f"{found.num_edges} edges meet {objective}{too_many}")
    if found.outcome is not None:
        print("\n" + table(found.outcome))
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from outrider.experiments.report.terminal import print_results
    from outrider.experiments.simulator.sweeps import play_sweep
    from outrider.experiments.sweep.config.loading import load_sweep

    if arguments.out is None:
        raise UsageError("--sweep needs --out DIR for its results")
    play_sweep(load_sweep(arguments.sweep), arguments.out, program="python -m outrider.experiments.simulator")
    print_results(arguments.out)
    print(f"\nresults in {arguments.out}")
    return 0


class _Progress:
    def __init__(self, seconds: float, is_silent: bool) -> None:
        self._seconds = seconds
        self._is_shown = not is_silent and sys.stderr.isatty()
        self._last_s = 0.0

    def __call__(self, virtual_s: float, wall_s: float) -> None:
        if not self._is_shown or time.monotonic() - self._last_s < 0.5:
            return
        self._last_s = time.monotonic()
        left_s = wall_s * (self._seconds - virtual_s) / virtual_s if virtual_s else 0.0
        text = f"{virtual_s:.1f} of {self._seconds:g} s played in {wall_s:.0f} s, about {left_s:.0f} s left"
        print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_shown:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)
