"""The simulator against what it promises, as measures: `exp.sim_error`, `exp.sim_10k`, `exp.repeat`.

python -m benchmarks.simulator_checks [--only sim_error,sim_10k,repeat] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.shared.results import ROOT, Measure, at_most, judged, print_table
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.run import Played
from outrider.experiments.simulator.shards import num_parts, play_parts

Found = tuple[list[Measure], dict[str, Any]]

TEN_THOUSAND = ROOT / "benchmarks" / "systems" / "ten-thousand.yaml"
REPEATED_SWEEP = ROOT / "benchmarks" / "sweeps" / "quick.yaml"
REPEATED_SYSTEM = ROOT / "benchmarks" / "systems" / "small.yaml"
MIN_ROUNDS, MAX_WALL_S = 500_000, 120.0


def exp_sim_error(is_quick: bool = False) -> Found:
    """Real edges over a real link beside the simulator; see `benchmarks.simulator_against_real`."""
    from benchmarks.simulator_against_real import compare, worst

    cells = compare(is_quick)
    error, noise = worst(cells)
    text = (
        "simulator : real runs over TUN, RTT 10/50/150 ms, 1 and 4 sessions, worst of TPOT and tokens/s; "
        f"real repeats differ by up to {100 * noise:.1f} % among themselves"
    )
    measure = judged("exp.sim_error", text, 100 * error, "%", at_most(10))
    return [measure], {"cells": [cell.as_json() for cell in cells]}


def exp_sim_10k(is_quick: bool = False) -> Found:
    """`is_quick` plays a tenth of the edges, and judges nothing."""
    system = load_system(TEN_THOUSAND)
    if is_quick:
        system = system.with_edges(system.num_edges // 10)
    played = play_parts(system)
    total = figures_of(played).total
    parts = num_parts(system)
    text = (
        f"{total.num_edges} edges, {played.seconds:g} virtual s, {_num_rounds(played)} rounds, {parts} cores"
    )
    details = {
        "num_rounds": _num_rounds(played),
        "us_a_round": round(1e6 * played.wall_s / _num_rounds(played), 1),
        "num_parts": parts,
        "total": asdict(total),
    }
    if is_quick:
        return [Measure("exp.sim_10k", text, round(played.wall_s, 1), "s")], details
    wording = f"<= {MAX_WALL_S:g}, >= {MIN_ROUNDS} rounds"
    is_enough = _num_rounds(played) >= MIN_ROUNDS and total.num_edges >= 10_000
    target = (wording, lambda wall_s: is_enough and wall_s <= MAX_WALL_S)
    return [judged("exp.sim_10k", text, played.wall_s, "s", target)], details


def exp_repeat(is_quick: bool = False) -> Found:
    """A sweep and a system, twice each, in processes with different hash seeds."""
    compared: dict[str, int] = {}
    different: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"sweep": ["--sweep", str(REPEATED_SWEEP)], "system": [str(REPEATED_SYSTEM)]}
        for name, source in sources.items():
            first, again = (_files(Path(scratch) / f"{name}-{seed}", source, seed) for seed in "12")
            for file in sorted(first | again):
                compared[f"{name}/{file}"] = len(first.get(file, b""))
                if first.get(file) != again.get(file):
                    different.append(f"{name}/{file}")
    text = (
        f"files that differ when {REPEATED_SWEEP.stem} is simulated again, of {len(compared)} "
        f"({sum(compared.values()) / 1e6:.1f} MB; the manifest, which says when, is left out)"
    )
    measure = judged("exp.repeat", text, len(different), "files", ("identical bytes", lambda n: n == 0))
    return [measure], {"bytes": compared, "different": different}


def _files(out: Path, source: list[str], hash_seed: str) -> dict[str, bytes]:
    command = [sys.executable, "-m", "outrider.experiments.simulator", *source, "--out", str(out)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"}


def _num_rounds(played: Played) -> int:
    """That the verifiers answered: those under way at the end too."""
    return sum(verifier.num_rounds for verifier in played.verifiers)


CHECKS: dict[str, Callable[[bool], Found]] = {
    "sim_error": exp_sim_error,
    "sim_10k": exp_sim_10k,
    "repeat": exp_repeat,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator_checks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(CHECKS), metavar="NAMES")
    parser.add_argument("--quick", action="store_true", help="shortened; judges nothing of the 10,000 edges")
    arguments = parser.parse_args()
    measures: list[Measure] = []
    for name in arguments.only.split(","):
        if name not in CHECKS:
            raise UsageError(f"--only {name}: want one of {', '.join(CHECKS)}")
        found, details = CHECKS[name](arguments.quick)
        measures += found
        print(json.dumps(details, indent=1))
    print_table(measures)
    return 0


if __name__ == "__main__":
    from outrider.experiments.shared.command import run_command

    run_command("checks", main)
