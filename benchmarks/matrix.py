"""The sweeps of `make experiments`: run, and turned into measures. Where a baseline wins, that comes first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import ROOT
from outrider.common.errors import OutriderError
from outrider.experiments.links.base import LinkRealisation, create_realisation
from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.report import render
from outrider.experiments.report.naming import Arm
from outrider.experiments.report.terminal import print_results
from outrider.experiments.shared.results import Measure
from outrider.experiments.sweep.config.loading import load_sweep
from outrider.experiments.sweep.results.records import BASELINES, CellRow, Comparison, Sweep, read_manifest
from outrider.experiments.sweep.running import make_plan, run_sweep

SWEEPS = ROOT / "benchmarks" / "sweeps"
RUNS = ROOT / "benchmarks" / "runs"  # not part of the repository


@dataclass(frozen=True, slots=True)
class Ran:
    """Holds a sweep that was run: its results, its folder with the report, and how long that took."""

    name: str
    sweep: Sweep
    folder: Path
    report: Path
    wall_s: float


def run_named(name: str, folder: Path | None = None, is_resumed: bool = False) -> Ran:
    """Runs `benchmarks/sweeps/NAME.yaml`, over TUN where this machine allows it, else through the proxy.

    Raises KeyboardInterrupt where it was interrupted; the folder is valid and can be gone on with.
    """
    start_s = time.monotonic()
    path = SWEEPS / f"{name}.yaml"
    config = load_sweep(path)
    if config.realisation == "tun":
        config = load_sweep(path, {"realisation": best_realisation().name})
    folder = folder or RUNS / name
    has_results = is_resumed and _has_results(folder)
    sweep = run_sweep(make_plan(config), folder, has_results, is_silent=False)
    if not sweep.is_complete:
        raise KeyboardInterrupt
    print_results(folder)
    report = render(folder)
    return Ran(name, sweep, folder, report, time.monotonic() - start_s)


def best_realisation() -> LinkRealisation:
    """Returns TUN where this machine allows it; else the proxy, with a line that says so."""
    tun = create_realisation("tun")
    if not (reasons := tun.refusals(LinkProfile(rtt_ms=1.0))):
        return tun
    print(f"no TUN here ({'; '.join(reasons)}): going through the proxy")
    return create_realisation("proxy")


def matrix_measures(ran: Sequence[Ran]) -> list[Measure]:
    """Returns `exp.matrix`: TPOT of every cell of ours against each baseline, the worst first."""
    rows = [row for each in ran for row in _rows(each.sweep)]
    rows.sort(key=lambda row: (row[1].kind not in ("cloud-only", "co-located"), row[1].ratio))
    return [_measure(cell, comparison) for cell, comparison in rows]


def text_measure(ran: Sequence[Ran]) -> Measure:
    """Returns how many of all texts were not what they must be: a speed-up of another text would be none."""
    wrong = sum(each.sweep.num_different_texts for each in ran)
    checks = [cell.texts for each in ran for cell in each.sweep.cells if cell.texts.is_exact_text]
    compared, ties = sum(check.num_compared for check in checks), sum(check.num_ties for check in checks)
    text = f"texts that differ from cloud-only's, of {compared} ({ties} ties)"
    return Measure("exp.matrix.texts", text, wrong, "texts", "<= 0", wrong == 0)


def noise_measures(ran: Sequence[Ran]) -> list[Measure]:
    """Returns the A/A measures."""
    found = []
    for each in ran:
        for cell in each.sweep.cells:
            if noise := cell.a_a.get("tpot_ms"):
                text = f"A/A: {cell.twin}{_range(noise['low'], noise['high'])}, {each.name}"
                found.append(Measure("exp.matrix.aa", text, noise["speedup"], "ratio"))
    return found


def details(ran: Sequence[Ran]) -> dict[str, Any]:
    """Returns the figures of each sweep."""
    return {each.name: _details(each) for each in ran}


def _details(ran: Ran) -> dict[str, Any]:
    manifest = read_manifest(ran.folder)
    return {
        "wall_s": round(ran.wall_s, 1),
        "realisation": ran.sweep.cells[0].realisation,
        "machine": manifest.machine,
        "links": manifest.realisation,
        "calibration": manifest.calibration,
        "cells": [_cell_details(cell) for cell in ran.sweep.cells],
        "predicted_tpot_ms": {p.cell: p.value for p in ran.sweep.predictions},
    }


def _rows(sweep: Sweep) -> Iterator[tuple[CellRow, Comparison]]:
    cells = {cell.id: cell for cell in sweep.cells if Arm.of(cell).is_speculation and not cell.twin}
    for comparison in sweep.comparisons:
        if comparison.cell in cells and comparison.metric == "tpot_ms" and comparison.kind in BASELINES:
            yield cells[comparison.cell], comparison


def _measure(cell: CellRow, comparison: Comparison) -> Measure:
    tpot = cell.metrics["tpot_ms"]
    text = f"{cell.id} : {comparison.baseline}, speed{_range(comparison.low, comparison.high)}; "
    text += f"TPOT {tpot.value:.2f} ms{_range(tpot.low, tpot.high)}"
    return Measure(f"exp.matrix.{comparison.kind}", text, comparison.ratio, "ratio")


def _cell_details(cell: CellRow) -> dict[str, Any]:
    wanted = ("tpot_ms", "ttft_ms", "commit_gap_p95_ms", "acceptance_rate", "tokens_per_round")
    metrics = {name: cell.metrics[name] for name in wanted if name in cell.metrics}
    return {
        "id": cell.id,
        "baseline": cell.baseline,
        "labels": cell.labels,
        **{name: [metric.value, metric.low, metric.high] for name, metric in metrics.items()},
    }


def _range(low: float | None, high: float | None) -> str:
    return f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""


def _has_results(folder: Path) -> bool:
    with contextlib.suppress(OutriderError):
        read_manifest(folder)
        return True
    return False
