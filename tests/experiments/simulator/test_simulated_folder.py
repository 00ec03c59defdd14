"""Played systems and simulated sweeps as results folders: whole, the same bytes every time, and drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from played_systems import edges, seen, system

from outrider.common.errors import UsageError
from outrider.common.types import Origin
from outrider.experiments.report import render
from outrider.experiments.simulator.command import main
from outrider.experiments.simulator.sweeps import play_sweep
from outrider.experiments.sweep.config.loading import load_sweep
from outrider.experiments.sweep.results.records import read_manifest, read_results

FILES = ("requests.jsonl", "rounds.jsonl", "visits.jsonl", "sweep.json", "summary.csv")
SYNTHETIC = {
    "name": "planned",
    "links": [{"rtt_ms": 20}, {"rtt_ms": 80}],
    "models": "synthetic",
    "synthetic": {"alpha": 0.8, "t_draft": "10ms", "t_target": "70ms"},
    "num_prompts": 2,
    "max_new_tokens": 24,
}


def write(path: Path, description: dict) -> Path:
    path.write_text(json.dumps(description))  # which is YAML
    return path


def play_in_a_process(path: Path, out: Path, hash_seed: str) -> dict[str, bytes]:
    command = [
        sys.executable,
        "-m",
        "outrider.experiments.simulator",
        "--sweep",
        str(path),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: (out / name).read_bytes() for name in FILES}


def test_a_sweep_repeated_with_the_same_seed_writes_the_same_bytes(tmp_path):
    path = write(tmp_path / "sweep.yaml", {**SYNTHETIC, "links": [{"rtt_ms": 80}]})
    first = play_in_a_process(path, tmp_path / "first", "1")
    assert first == play_in_a_process(path, tmp_path / "again", "2")


def test_a_simulated_sweep_has_every_baseline_and_a_report(tmp_path):
    sweep = play_sweep(load_sweep(write(tmp_path / "sweep.yaml", SYNTHETIC)), tmp_path / "out")
    assert {point["what"] for point in read_manifest(tmp_path / "out").calibration} >= {"rtt"}
    assert sweep.is_complete and sweep.num_different_texts == 0
    assert {cell.baseline for cell in sweep.cells} >= {"cloud-only", "co-located", "edge-only", "fixed"}
    assert {cell.realisation for cell in sweep.cells} == {"simulated", "none"}
    twin = next(cell for cell in sweep.cells if cell.twin)
    assert twin.a_a["tpot_ms"]["speedup"] == 1.0
    assert "Played in virtual time" in render(tmp_path / "out").read_text(encoding="utf-8")


def test_outages_begin_anew_with_each_simulated_request(tmp_path):
    gone = {"name": "gone", "rtt_ms": 20, "outages": [{"start_s": 0.5, "duration_s": 2}]}
    sweep = {**SYNTHETIC, "links": [gone], "baselines": ["cloud-only"], "a_a": False, "repeats": 1}
    play_sweep(load_sweep(write(tmp_path / "sweep.yaml", sweep)), tmp_path / "out")
    results = read_results(tmp_path / "out")
    assert len(results.requests) == 4 and len(results.visits) == 4
    for row in results.requests:
        gaps = [b - a for a, b in zip(row.commit_times_ms, row.commit_times_ms[1:], strict=False)]
        assert row.link_age_ms == 0 and max(gaps) > 1000


def test_a_played_system_is_a_folder_with_a_cell_a_group(tmp_path):
    groups = edges(name="a", count=2, requests=2), edges(name="b", requests=1, link="4g")
    path = write(tmp_path / "system.yaml", system(*groups))
    assert main([str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    results = read_results(tmp_path / "out")
    assert results.sweep is not None and len(results.sweep.cells) == 2
    assert len(results.requests) == 5 and all(row.num_tokens == 40 for row in results.requests)
    assert len(results.rounds) == sum(row.num_rounds for row in results.requests)
    assert all("simulated" in cell.realisation for cell in results.sweep.cells)
    render(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": {"target": ".", "draft": "."}}, "models: "),
        ({"edge": {"draft_strategy": "prompt-lookup"}}, "draft_strategy: prompt-lookup in "),
        ({"prompts": "prompts.jsonl", "num_prompts": 1}, "prompts: "),
    ],
)
def test_what_was_not_recorded_is_refused_and_not_played_as_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"id": "mine", "prompt": "prose"}')
    plain = {"links": [{"rtt_ms": 20}], "num_prompts": 2, "max_new_tokens": 8}
    config = load_sweep(write(tmp_path / "sweep.yaml", plain | change))
    with pytest.raises(UsageError, match=words):
        play_sweep(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_a_round_are_those_of_rounds_also_where_they_are_pipelined() -> None:
    edge = {"pipeline": "on", "num_speculative_tokens": 4}
    found = seen(system(edges(requests=1, edge=edge, output_tokens=200)))
    result = found.logs[0].result
    assert result is not None
    num_tokens = sum(
        origin in (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS) for origin in result.origins
    )
    num_rounds = sum(each.is_answered for each in result.stats.rounds)
    assert found.outcome.total.tokens_per_round == pytest.approx(num_tokens / num_rounds, abs=1e-3)


def test_encryption_is_not_simulated(tmp_path):
    config = load_sweep(write(tmp_path / "sweep.yaml", {**SYNTHETIC, "tls": True}))
    with pytest.raises(UsageError, match="tls: is not simulated"):
        play_sweep(config, tmp_path / "out")


def test_a_simulated_folder_is_not_told_to_go_on(tmp_path):
    config = load_sweep(write(tmp_path / "sweep.yaml", {**SYNTHETIC, "links": [{"rtt_ms": 80}]}), {})
    play_sweep(config, tmp_path / "out")
    with pytest.raises(UsageError, match="holds results already: give another --out"):
        play_sweep(config, tmp_path / "out")
