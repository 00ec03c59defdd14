"""A sweep as a researcher runs it: processes, links, texts, report; interrupted and gone on with."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matrix import run_named
from outrider.common.errors import UsageError
from outrider.experiments.sweep.config.loading import load_sweep
from outrider.experiments.sweep.results.folder import create_folder, new_manifest
from outrider.experiments.sweep.results.records import (
    BASELINES,
    REQUESTS,
    SUMMARY,
    SWEEP,
    Results,
    read_results,
)
from outrider.experiments.sweep.running import make_plan, run_sweep

SYNTHETIC = """
name: small
links: {rtt_ms: 10}
policies: optimal
sessions: 2
num_prompts: 1
max_new_tokens: 10
models: synthetic
synthetic: {alpha: 0.8, t_draft: 1ms, t_target: 4ms}
baselines: [cloud-only, fixed]
repeats: 2
calibrate: false
"""


@pytest.mark.slow
@pytest.mark.ci
def test_the_whole_chain_with_the_embedded_pair(tmp_path: Path) -> None:
    ran = run_named("ci", tmp_path / "ci")
    results = read_results(ran.folder)
    assert results.sweep is not None and results.sweep.is_complete
    assert {cell.baseline for cell in results.sweep.cells} == {"", *BASELINES}
    assert len(results.requests) == 30 and not any(row.error for row in results.requests)
    exact = [cell.texts for cell in results.sweep.cells if cell.texts.is_exact_text]
    assert results.sweep.num_different_texts == 0
    assert sum(check.num_equal + check.num_ties for check in exact) == 27  # all but edge-only's
    _check_measured(results)
    page = ran.report.read_text(encoding="utf-8")
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) >= 3
    for drawing in drawings:
        ET.fromstring(drawing)
    assert not re.search(r'(src|href)="https?://', page)  # self-contained


def _check_measured(results: Results) -> None:
    assert results.sweep is not None
    metrics = {cell.id: cell.metrics for cell in results.sweep.cells}
    near, far = metrics["loopback speculative optimal T0.8"], metrics["rtt_ms=20 speculative optimal T0.8"]
    # A link takes no less than its own round trip; a busy machine adds to it.
    assert near["round_net_ms"].value > 0 and far["round_net_ms"].value > 19
    cloud = metrics["rtt_ms=20 cloud-only T0.8"]
    assert cloud["verifier_calls_per_token"].value == pytest.approx(11 / 12, abs=1e-3)  # but the opening's
    assert metrics["none edge-only T0.8"]["target_nats_per_token"].unit == "nats"
    assert cloud["verifier_peak_rss_mb"].value > cloud["edge_peak_rss_mb"].value > 20
    assert 0 < cloud["verifier_kv_peak_share"].value < 1 and "gpu_peak_reserved_mb" not in cloud
    manifest = results.manifest
    assert manifest.models["target_fingerprint"] and manifest.models["draft_fingerprint"]
    assert manifest.realisation["rtt_ms=20"]["congestion_control"]
    assert manifest.commit and manifest.finished >= manifest.started


# Ctrl-C as a terminal sends it, to every process of the command, once so many requests are on disk.
_STOPPED = """
import os, signal, sys
from outrider.edge_client.commands.cli import main
from outrider.experiments.sweep.results.folder import ResultsFolder
add, num_left = ResultsFolder.add_request, int(sys.argv.pop(1))
def add_request(*arguments):
    global num_left
    add(*arguments)
    num_left -= 1
    if num_left == 0:
        os.killpg(0, signal.SIGINT)
ResultsFolder.add_request = add_request
sys.exit(main(sys.argv[1:]))
"""


def bench(*arguments: str, stop_after: int = 0) -> tuple[int, str, str]:
    """Runs the command; with `stop_after` Ctrl-C comes when so many requests are on disk."""
    program = ["-c", _STOPPED, str(stop_after)] if stop_after else ["-m", "outrider.edge_client"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    process = subprocess.Popen(
        [sys.executable, *program, "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_leaves_valid_results_and_resume_runs_only_what_is_left(tmp_path: Path) -> None:
    sweep, folder = tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text(SYNTHETIC)
    status, out, err = bench(str(sweep), "--out", str(folder), "--no-report", stop_after=3)
    assert status == 130, err
    assert "interrupted" in out
    first = read_results(folder)
    assert first.sweep is not None and not first.sweep.is_complete
    assert 3 <= len(first.requests) < 16
    assert not any(row.error for row in first.requests)
    assert (folder / SUMMARY).exists()

    status, out, err = bench(str(sweep), "--out", str(folder), "--no-report", "--resume", "--json")
    assert status == 0, err
    report: dict[str, Any] = json.loads(out)
    assert report["is_complete"] and report["missing_baselines"] == ["co-located", "edge-only"]
    assert err == ""  # --json: no progress
    results = read_results(folder)
    assert len(results.requests) == 16  # 3 cells and the twin, 2 sessions, 2 repeats
    # A visit's two sessions run side by side: where Ctrl-C came between them, both ran again.
    sizes = Counter((row.cell, row.repeat) for row in first.requests)
    whole = [row for row in first.requests if sizes[row.cell, row.repeat] == 2]
    assert len(whole) >= 2
    assert [row for row in results.requests if row.request in {r.request for r in whole}] == whole
    assert results.sweep is not None and results.sweep.num_different_texts == 0
    assert all(cell.is_synthetic and "synthetic" in cell.labels for cell in results.sweep.cells)


def test_prompts_that_changed_since_may_not_go_on_in_the_folder(tmp_path: Path) -> None:
    """The rest would be of another text than what is there, under the same prompt's id."""
    prompts, folder = tmp_path / "mine.jsonl", tmp_path / "out"
    prompts.write_text('{"id": "a", "prompt": "def mean(values):"}')
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"realisation: direct\nlinks: {{}}\nprompts: {prompts}\nnum_prompts: 1\nname: x")
    plan = make_plan(load_sweep(sweep, {}))
    create_folder(folder, new_manifest("edge-client", "x", plan.resolved(), 0))
    prompts.write_text('{"id": "a", "prompt": "def median(values):"}')
    changed = make_plan(load_sweep(sweep, {}))
    with pytest.raises(UsageError, match=r"made with prompts_sha256: .*: give another --out"):
        run_sweep(changed, folder, is_resumed=True, is_silent=True)


def test_a_verifier_that_does_not_answer_is_told_before_anything_runs(tmp_path: Path) -> None:
    sweep, folder = tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text("realisation: direct\nverifier: 127.0.0.1:1\nnum_prompts: 1")
    status, _, err = bench(str(sweep), "--out", str(folder))
    assert status == 3
    assert "verifier: cannot connect to a verifier at 127.0.0.1:1" in err
    assert not folder.exists()


def test_a_text_that_is_not_cloud_onlys_is_reported_first_and_fails_the_command(tmp_path: Path) -> None:
    sweep, folder = tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text(SYNTHETIC.replace("sessions: 2", "sessions: 1").replace("repeats: 2", "repeats: 1"))
    assert bench(str(sweep), "--out", str(folder), "--no-report")[0] == 0
    rows = (folder / REQUESTS).read_text().splitlines()
    index = next(i for i, line in enumerate(rows) if json.loads(line)["cell"].endswith("fixed-4 T0.8"))
    forged = json.loads(rows[index])
    forged["token_ids"][3] += 1
    rows[index] = json.dumps(forged)
    (folder / REQUESTS).write_text("\n".join(rows) + "\n")
    status, out, _ = bench(str(sweep), "--out", str(folder), "--no-report", "--resume")
    assert status == 1
    assert out.startswith("TEXTS DIFFER: 1 texts")
    assert json.loads((folder / SWEEP).read_text())["num_different_texts"] == 1
