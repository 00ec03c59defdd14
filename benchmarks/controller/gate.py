"""`ctl.gate`: what the commit-gate saves and costs at the thresholds that `edge-client calibrate` finds.

Real sessions with the embedded pair over loopback, through the command as a user runs it. Reported as it is:
counts of calls and texts, which no other work on the machine changes; nothing here is timed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS
from outrider.common.errors import OutriderError
from outrider.edge_client.calibration.curve import KEEP_ALL, NO_GATE
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.results import Measure

TEMPERATURES = (0.8, 0.0)
PASSAGES = "24"
NEW_TOKENS = "96"
PERCENTILES = "50,60,70,80,90,95,99"
SETTING = "80"  # what `_calibrate` sets by default, and the measures are taken at


def gate_measures() -> tuple[list[Measure], dict[str, Any]]:
    """Runs `edge-client calibrate` at every temperature. Returns measures at the default percentile and at
    both ends, the whole curves, and writes a figure beside the JSON."""
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    with running_verifier("--log-level", "warning") as verifier, tempfile.TemporaryDirectory() as folder:
        for temperature in TEMPERATURES:
            name = f"gate_curve_t{temperature:g}.svg"
            report = _calibrate(verifier.address, temperature, Path(folder) / "gate.yaml", RESULTS / name)
            details[f"T={temperature:g}"] = {**report, "out": "", "figure": name}
            measures += make_measures(report["curve"], temperature)
    return measures, details


def _calibrate(address: str, temperature: float, out: Path, svg: Path) -> dict[str, Any]:
    svg.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["calibrate", "--json", "--verifier", address, "--temperature", f"{temperature:g}"]
    arguments += ["--out", str(out), "--svg", str(svg), "--curve", PERCENTILES]
    arguments += ["--passages", PASSAGES, "--new-tokens", NEW_TOKENS]
    done = run_edge(arguments, timeout_s=900.0)
    if done.returncode:
        raise OutriderError(f"edge-client {' '.join(arguments)}: {done.stderr[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def make_measures(curve: dict[str, Any], temperature: float) -> list[Measure]:
    """Returns the measures of one curve, without targets."""
    by_setting = {point["setting"]: point for point in curve["points"]}
    suffix = "" if temperature == TEMPERATURES[0] else f"_t{temperature:g}"
    measures = []
    for setting, name in ((NO_GATE, "off"), (SETTING, SETTING), (KEEP_ALL, "all")):
        point = by_setting[setting]
        text = (
            f"calls saved by the commit-gate, T={temperature:g}, {setting}: {point['share_equal']:.1%} of "
            f"tokens equal to cloud-only, target's loss {_nats(point['target_nats'])} nats a token "
            f"(cloud-only {_nats(curve['cloud_only_nats'])})"
        )
        measures.append(Measure(f"ctl.gate_{name}{suffix}", text, round(point["calls_saved"], 4), "share"))
    return measures


def _nats(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
