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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.controller.plan_check import plan_check
from benchmarks.matrix import (
    RUNS,
    best_realisation,
    details,
    matrix_measures,
    noise_measures,
    run_named,
    text_measure,
)
from benchmarks.results_file import Found, pick_names, write_results
from benchmarks.simulator_checks import exp_sim_10k, exp_sim_error
from outrider.experiments.links.base import REALISATIONS
from outrider.experiments.links.calibrate import exp_links, run
from outrider.experiments.links.calibration.measure import Plan
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged

QUICK_SWEEPS = ("quick",)
FULL_SWEEPS = ("matrix", "slower-30", "slower-70")
CI_SECONDS = 180.0


def _links(arguments: argparse.Namespace) -> Found:
    plan = Plan(num_trips=20, throughput_s=2.0) if arguments.quick else Plan()
    measure, found = exp_links(run(REALISATIONS, plan))
    return [measure], found


def _plan(arguments: argparse.Namespace) -> Found:
    return plan_check(
        best_realisation(),
        min_forward_ms=30.0,
        min_draft_ms=3.0,
        num_repeats=2 if arguments.quick else 6,
        num_new=64 if arguments.quick else 128,
        say=lambda line: print(f"  {line}", flush=True),
    )


def _simulator(arguments: argparse.Namespace) -> Found:
    error, error_details = exp_sim_error(arguments.quick)
    many, many_details = exp_sim_10k()
    return [*error, *many], {"sim_error": error_details, "sim_10k": many_details}


def _ci(arguments: argparse.Namespace) -> Found:
    with tempfile.TemporaryDirectory() as directory:
        ran = run_named("ci", Path(directory) / "ci")
    text = "sweep with every baseline over two links, texts checked, report written"
    return [judged("exp.ci", text, ran.wall_s, "s", at_most(CI_SECONDS))], {"wall_s": round(ran.wall_s, 1)}


def _matrix(arguments: argparse.Namespace) -> Found:
    names = QUICK_SWEEPS if arguments.quick else FULL_SWEEPS
    if not arguments.resume:
        for name in names:
            shutil.rmtree(RUNS / name, ignore_errors=True)
    ran = [run_named(name, is_resumed=arguments.resume) for name in names]
    return [text_measure(ran), *matrix_measures(ran), *noise_measures(ran)], details(ran)


CASES: dict[str, Callable[[argparse.Namespace], Found]] = {
    "links": _links,
    "plan": _plan,
    "simulator": _simulator,
    "ci": _ci,
    "matrix": _matrix,
}


def main() -> int:
    """Runs the command."""
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
    for name in pick_names(arguments.only, CASES):
        print(f"\n=== {name}", flush=True)
        start_s = time.monotonic()
        its_measures, its_details = CASES[name](arguments)
        measures += its_measures
        found[name] = its_details | {"seconds": round(time.monotonic() - start_s, 1)}
    write_results("experiments" if arguments.quick else "experiments_full", measures, found)
    return 0


if __name__ == "__main__":
    run_command("experiments", main)
