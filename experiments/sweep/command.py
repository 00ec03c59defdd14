"""`edge-client bench SWEEP.yaml`: run a sweep, or print what it would run."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UsageError

if TYPE_CHECKING:
    from experiments.sweep.records import Sweep

EXIT_DIFFERENT_TEXTS = 1
EXIT_INTERRUPTED = 130
SIMULATED = "simulated"
EXAMPLE = Path(__file__).resolve().parent / "example.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", nargs="?", type=Path, metavar="SWEEP.yaml", help="what to run")
    parser.add_argument("--example", action="store_true", help="print a sweep with all its keys explained")
    parser.add_argument("--list", action="store_true", help="print the cells and how many requests")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results (default: sweeps/NAME-TIME)")
    parser.add_argument("--resume", action="store_true", help="go on with the results in --out")
    parser.add_argument("--repeats", type=int, metavar="N", help="instead of the sweep's own")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only cells with TEXT in their name")
    parser.add_argument("--json", action="store_true", help="print sweep.json; no table, no progress")
    parser.add_argument("--no-report", action="store_true", help="leave report.html out")


def main(namespace: argparse.Namespace) -> int:
    """0; 1 where texts differ that must not; 130 after Ctrl-C, with valid results."""
    if namespace.example:
        print(EXAMPLE.read_text(encoding="utf-8"), end="")
        return 0
    if namespace.sweep is None:
        raise UsageError("no sweep given: bench SWEEP.yaml, or --example for one to start from")
    if namespace.resume and namespace.out is None:
        raise UsageError("--resume needs --out DIR, the results to go on with")
    from experiments.sweep.config import load_sweep
    from experiments.sweep.running import make_plan, run_sweep

    flags = {} if namespace.repeats is None else {"repeats": namespace.repeats}
    plan = make_plan(load_sweep(namespace.sweep, flags), namespace.only or ())
    if namespace.list:
        print("\n".join(cell.id + (f"  [{cell.baseline}]" if cell.baseline else "") for cell in plan.cells))
        print(f"{len(plan.cells)} cells, {plan.num_requests} requests", file=sys.stderr)
        return 0
    out = namespace.out or _default_folder(plan.config.name)
    if plan.config.realisation == SIMULATED:
        sweep = _simulate(namespace, out)
    else:
        sweep = run_sweep(plan, out, namespace.resume, is_silent=namespace.json)
    if namespace.json:
        from experiments.sweep.records import to_json

        print(json.dumps({"folder": str(out), **to_json(sweep)}))
    else:
        from experiments.sweep.table import print_sweep

        print_sweep(sweep)
        print(f"\nresults in {out}")
    if not namespace.no_report:
        report = write_report(out)
        print(f"report in {report}", file=sys.stderr)
    if sweep.num_different_texts:
        return EXIT_DIFFERENT_TEXTS
    return 0 if sweep.is_complete else EXIT_INTERRUPTED


def _simulate(namespace: argparse.Namespace, out: Path) -> Sweep:
    """The whole sweep in virtual time, in seconds: nothing to go on with, nothing to leave out."""
    for flag in ("resume", "only", "repeats"):
        if getattr(namespace, flag):
            raise UsageError(f"--{flag} is for real links; realisation: {SIMULATED} plays a sweep as it is")
    from experiments.simulator.sweeps import play_sweep

    return play_sweep(namespace.sweep, out)


def write_report(folder: Path) -> Path:
    from experiments.report import render

    return render(folder)


def _default_folder(name: str) -> Path:
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return Path("sweeps") / f"{kept}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
