"""`edge-client bench SWEEP.yaml`: run a sweep, or print what it would run."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.errors import UsageError

if TYPE_CHECKING:
    from outrider.experiments.sweep.results.records import Sweep
    from outrider.experiments.sweep.running import Plan

EXIT_DIFFERENT_TEXTS = 1
EXIT_INTERRUPTED = 130
EXAMPLE = Path(__file__).resolve().parent / "sweep" / "example.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `edge-client bench`."""
    parser.add_argument("sweep", nargs="?", type=Path, metavar="SWEEP.yaml", help="what to run")
    parser.add_argument("--example", action="store_true", help="print a sweep with all its keys explained")
    parser.add_argument("--list", action="store_true", help="check the sweep, print its cells")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results (default: sweeps/NAME-TIME)")
    parser.add_argument("--resume", action="store_true", help="go on with the results in --out")
    parser.add_argument("--repeats", type=int, metavar="N", help="instead of the sweep's own")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only cells with TEXT in their name")
    parser.add_argument("--json", action="store_true", help="print sweep.json; no table, no progress")
    parser.add_argument("--no-report", action="store_true", help="leave report.html out")


def main(namespace: argparse.Namespace) -> int:
    """Runs the command. Returns 0, 1 where texts differ that must not, or 130 after Ctrl-C, with valid
    results."""
    if namespace.example:
        print(EXAMPLE.read_text(encoding="utf-8"), end="")
        return 0
    if namespace.sweep is None:
        raise UsageError("no sweep given: bench SWEEP.yaml, or --example for one to start from")
    if namespace.resume and namespace.out is None:
        raise UsageError("--resume needs --out DIR, the results to go on with")
    from outrider.experiments.report import check_installed, render
    from outrider.experiments.sweep.checking import check_cells
    from outrider.experiments.sweep.config.loading import load_sweep
    from outrider.experiments.sweep.config.schema import SIMULATED
    from outrider.experiments.sweep.running import make_plan

    flags = {} if namespace.repeats is None else {"repeats": namespace.repeats}
    plan = make_plan(load_sweep(namespace.sweep, flags), namespace.only or ())
    is_simulated = plan.config.realisation == SIMULATED
    if is_simulated and namespace.resume:
        raise UsageError(
            f"--resume is for real links; realisation: {SIMULATED} takes seconds, run it again with another --out"
        )
    check_cells(plan)
    if not namespace.no_report:
        check_installed()
    if namespace.list:
        print("\n".join(cell.id + (f"  [{cell.baseline}]" if cell.baseline else "") for cell in plan.cells))
        print(f"{len(plan.cells)} cells, {plan.num_requests} requests", file=sys.stderr)
        return 0
    out = namespace.out or _default_folder(plan.config.name)
    sweep = _simulate(namespace, plan, out) if is_simulated else _run(namespace, plan, out)
    if namespace.json:
        from outrider.experiments.sweep.results.records import to_json

        print(json.dumps({"folder": str(out), **to_json(sweep)}))
    else:
        from outrider.experiments.report.terminal import print_results

        print_results(out)
        print(f"\nresults in {out}")
    if not namespace.no_report:
        print(f"report in {render(out)}", file=sys.stderr)
    if sweep.num_different_texts:
        return EXIT_DIFFERENT_TEXTS
    return 0 if sweep.is_complete else EXIT_INTERRUPTED


def _run(namespace: argparse.Namespace, plan: Plan, out: Path) -> Sweep:
    from outrider.experiments.sweep.checking import check_verifier
    from outrider.experiments.sweep.running import run_sweep

    check_verifier(plan)
    return run_sweep(plan, out, namespace.resume, is_silent=namespace.json)


def _simulate(namespace: argparse.Namespace, plan: Plan, out: Path) -> Sweep:
    from outrider.experiments.simulator.sweeps import play_sweep

    return play_sweep(plan.config, out, namespace.only or ())


def _default_folder(name: str) -> Path:
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return Path("sweeps") / f"{kept}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
