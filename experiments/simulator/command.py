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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.experiments.simulator.config import System, load_system
from outrider.experiments.simulator.figures.outcome import SystemFigures, figures_of, table
from outrider.experiments.simulator.shards import play_parts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    arguments = _parse(argv)
    if arguments.sweep is not None:
        return _sweep(arguments)
    if arguments.system is None:
        raise UsageError("no system given; docs/simulator.md has an example")
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


def _find_capacity(system: System, goal: str, is_json: bool) -> int:
    from outrider.experiments.simulator.capacity import find_capacity, parse_objective

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
