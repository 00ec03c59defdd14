"""Checks the verifier on this machine's GPU: environment, kernels, attention, steps, texts, server, training.

    python -m benchmarks.gpu_check [--out DIR] [--deadline 560] [--commit ID]
    python -m benchmarks.gpu_check --rehearse

It installs nothing. Each stage is a process with a limit; the record is written after each, and what finds no
package or no time is reported as not run. `--rehearse` runs every stage on a CPU in toy sizes, with Triton's
interpreter: it measures no GPU, and its record is not kept with the results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.plan import STAGES, TOTAL_S
from benchmarks.gpu_check.runner import ROOT, Outcome, Run, run_stages

RESULTS = ROOT / "benchmarks" / "results"
MAX_REHEARSAL_S = 120
VERDICTS = {True: "pass", False: "MISS", None: ""}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where every stage passed and no figure missed its target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="of the record; default benchmarks/results")
    parser.add_argument("--deadline", type=float, default=TOTAL_S, metavar="S", help="of all stages together")
    parser.add_argument("--commit", metavar="ID", help="of these sources, where this is a copy and no clone")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in toy sizes")
    parser.add_argument("--only", default="", metavar="STAGE,STAGE", help="environment is always run")
    options = parser.parse_args(arguments)
    wanted = {name for name in options.only.split(",") if name}
    if unknown := wanted - {stage.name for stage in STAGES}:
        parser.error(f"--only {', '.join(unknown)}: want some of {', '.join(stage.name for stage in STAGES)}")
    if options.rehearse and options.out is not None and options.out.resolve() == RESULTS:
        parser.error(
            "--out benchmarks/results: a rehearsal measures no GPU; leave --out away, or name another"
        )
    out = options.out or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if options.rehearse else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, options.rehearse, options.deadline, options.commit)
    (out / f"{run.name}.log").unlink(missing_ok=True)
    stages = [stage for stage in STAGES if not wanted or stage.name in wanted or stage.is_needed]
    run_stages(run, stages, lambda line: print(line, flush=True))
    if run.is_rehearsal and not wanted:
        run.outcomes.append(_judge_rehearsal(run))
    what = "on a CPU in toy sizes: no figure is a GPU's; " if run.is_rehearsal else ""
    where = f"written to {run.write()}" if run.is_kept else "nothing is written"
    print("\n".join(("", *table(run.outcomes), "", f"{what}{run.seconds:.0f} s; {where}")))
    return 0 if run.is_right else 1


def _judge_rehearsal(run: Run) -> Outcome:
    num_passed = sum(each.status == "passed" and not each.missed for each in run.outcomes)
    measure = {
        "id": "gpu.rehearse",
        "measure": f"the rehearsal on a CPU; {num_passed} of {len(run.outcomes)} stages passed",
        "value": round(run.seconds, 1),
        "unit": "s",
        "target": f"all, <= {MAX_REHEARSAL_S}",
        "met": num_passed == len(run.outcomes) and run.seconds <= MAX_REHEARSAL_S,
    }
    return Outcome("rehearsal", "passed", measures=[measure])


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the lines of the last table: a figure a line, below its stage and the stage's seconds."""
    lines = [f"{'stage':<20}{'s':>6}  {'figure':<38}{'value':>13} {'unit':<9}{'target':<14}{'':<6}measure"]
    for each in outcomes:
        head = f"{each.stage:<20}{each.seconds:>6.1f}  "
        rows = [_figure(measure) for measure in each.measures]
        if each.status != "passed":
            rows.insert(0, f"{each.status.upper()}: {each.reason}")
        rows += [f"{part} not run: {reason}" for part, reason in each.skipped.items()]
        lines += [(head if row is rows[0] else " " * len(head)) + row for row in rows]
    return lines


def _figure(measure: dict[str, Any]) -> str:
    value = f"{measure['value']:,.4g}"
    verdict = VERDICTS[measure["met"]]
    tail = f"{measure['target']:<14}{verdict:<6}{measure['measure']}"
    return f"{measure['id']:<38}{value:>13} {measure['unit']:<9}{tail}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
