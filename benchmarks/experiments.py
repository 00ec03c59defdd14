"""`make experiments-quick`, `make experiments`: links, simulator, plan and sweeps against what they promise.

Quick takes less than ten minutes and writes benchmarks/results/experiments.json; without --quick the whole
matrix is run, for hours, into benchmarks/runs/ (--resume goes on after an interruption), and the file is
experiments_full.json.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix import (
    RUNS,
    best_realisation,
    details,
    matrix_measures,
    noise_measures,
    run_named,
    text_measure,
)
from outrider.common.errors import UsageError
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged, write_results

Found = tuple[list[Measure], dict[str, Any]]

QUICK_SWEEPS = ("quick",)
FULL_SWEEPS = ("matrix", "slower-30", "slower-70")
CI_SECONDS = 180.0


def measure_links(is_quick: bool, is_resumed: bool) -> Found:
    from outrider.experiments.links.base import REALISATIONS
    from outrider.experiments.links.calibrate import exp_links, run
    from outrider.experiments.links.calibration.measure import Plan

    plan = Plan(num_trips=20, throughput_s=2.0) if is_quick else Plan()
    measure, found = exp_links(run(REALISATIONS, plan))
    return [measure], found


def measure_plan(is_quick: bool, is_resumed: bool) -> Found:
    """`exp.plan_error`, and ctl.model beside it."""
    from benchmarks.controller.plan_check import plan_check

    check = plan_check(
        best_realisation(),
        min_forward_ms=30.0,
        min_draft_ms=3.0,
        num_repeats=2 if is_quick else 6,
        num_new=64 if is_quick else 128,
        say=lambda line: print(f"  {line}", flush=True),
    )
    return list(check.measures), check.details


def measure_simulator(is_quick: bool, is_resumed: bool) -> Found:
    """`exp.sim_error` and `exp.sim_10k`, by the simulator's own checks."""
    from benchmarks.simulator_checks import exp_sim_10k, exp_sim_error

    error, error_details = exp_sim_error(is_quick)
    many, many_details = exp_sim_10k()
    return [*error, *many], {"sim_error": error_details, "sim_10k": many_details}


def measure_repeat(is_quick: bool, is_resumed: bool) -> Found:
    from benchmarks.simulator_checks import exp_repeat

    return exp_repeat()


def measure_ci(is_quick: bool, is_resumed: bool) -> Found:
    """The whole chain at its smallest, as the test runs it."""
    with tempfile.TemporaryDirectory() as directory:
        ran = run_named("ci", Path(directory) / "ci")
    text = "sweep with every baseline over two links, texts checked, report written"
    return [judged("exp.ci", text, ran.wall_s, "s", at_most(CI_SECONDS))], {"wall_s": round(ran.wall_s, 1)}


def measure_matrix(is_quick: bool, is_resumed: bool) -> Found:
    names = QUICK_SWEEPS if is_quick else FULL_SWEEPS
    if not is_resumed:
        for name in names:
            shutil.rmtree(RUNS / name, ignore_errors=True)
    ran = [run_named(name, is_resumed=is_resumed) for name in names]
    return [text_measure(ran), *matrix_measures(ran), *noise_measures(ran)], details(ran)


CASES: dict[str, Callable[[bool, bool], Found]] = {
    "links": measure_links,
    "plan": measure_plan,
    "simulator": measure_simulator,
    "repeat": measure_repeat,
    "ci": measure_ci,
    "matrix": measure_matrix,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a small matrix, less than ten minutes in all")
    parser.add_argument("--resume", action="store_true", help="go on with the sweeps in benchmarks/runs")
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {','.join(CASES)}")
    arguments = parser.parse_args()
    measures: list[Measure] = []
    found: dict[str, Any] = {}
    for name in pick_cases(arguments.only):
        print(f"\n=== {name}", flush=True)
        start_s = time.monotonic()
        its_measures, its_details = CASES[name](arguments.quick, arguments.resume)
        measures += its_measures
        found[name] = its_details | {"seconds": round(time.monotonic() - start_s, 1)}
    write_results("experiments" if arguments.quick else "experiments_full", measures, found)
    return 0


def pick_cases(only: str) -> Sequence[str]:
    """Raises `UsageError` naming the known ones."""
    names = [name.strip() for name in only.split(",") if name.strip()] or list(CASES)
    for name in names:
        if name not in CASES:
            raise UsageError(f"--only {name}: want one of {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    run_command("experiments", main)
