"""The simulator against what it promises, as measures: `exp.sim_error`, `exp.sim_10k`, `exp.repeat`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.run import Played
from outrider.experiments.simulator.shards import num_parts, play_parts

SYSTEMS = ROOT / "experiments" / "simulator" / "systems"
TEN_THOUSAND = SYSTEMS / "ten-thousand.yaml"
REPEATED_SWEEP = ROOT / "benchmarks" / "sweeps" / "quick.yaml"
REPEATED_SYSTEM = SYSTEMS / "small.yaml"
MIN_ROUNDS, MAX_WALL_S = 500_000, 120.0


def exp_sim_error(is_quick: bool = False) -> Found:
    """Compares real edges over a real link with the simulator; see `benchmarks.simulator_against_real`."""
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
    """Times a system of 10,000 edges; `is_quick` plays a tenth of them, and judges nothing."""
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


def exp_repeat() -> Found:
    """Simulates a sweep and a system, twice each, in processes with different hash seeds."""
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
    return sum(verifier.num_rounds for verifier in played.verifiers)
