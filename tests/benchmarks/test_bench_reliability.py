"""`make bench-reliability` as a program: its stages in short forms, and what they judge."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import results_file
from benchmarks.reliability import run as bench
from benchmarks.reliability.edges import EdgeLog
from benchmarks.reliability.fuzz import SESSIONS_A_TENANT, TENANTS, frames_of_session
from benchmarks.reliability.overload import judge, summarise
from benchmarks.reliability.setup import Settings
from benchmarks.reliability.soak import growth_error_percent, growth_percent
from outrider.experiments.shared.results import Measure


def test_every_stage_has_its_module() -> None:
    missing = [
        m for m in bench.STAGES.values() if not importlib.util.find_spec(f"benchmarks.reliability.{m}")
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["overload", "frames", "wire", "outage", "exact", "exact_cost"])
def test_a_stage_runs_from_its_beginning_to_its_measures(name: str) -> None:
    measures = [each for each, _ in bench.stage(name, Settings(is_smoke=True))][-1]
    prefix = "bf16" if name == "exact" else name
    assert measures and all(re.fullmatch(rf"rel\.{prefix}(_\w+)?", each.id) for each in measures)
    if name not in ("overload", "exact_cost"):  # those of times
        assert all(each.met for each in measures), measures


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["storm", "sigkill", "hostile", "soak"])
def test_a_longer_stage_runs_from_its_beginning_to_its_measures(name: str) -> None:
    measures = [each for each, _ in bench.stage(name, Settings(is_smoke=True))][-1]
    assert measures and all(re.fullmatch(rf"rel\.{name}(_\w+)?", each.id) for each in measures)
    if name == "sigkill":
        assert measures[0].met, measures


def test_a_stage_measured_again_replaces_its_own_figures_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = map(float, itertools.count(1))
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(results_file, "ROOT", tmp_path)
    monkeypatch.setattr(
        bench,
        "stage",
        lambda name, settings: iter([([Measure(f"rel.{name}", "text", next(values), "ratio")], {})]),
    )
    for only in ("wire,storm", "storm"):
        monkeypatch.setattr("sys.argv", ["run", "--only", only])
        bench.main()
    record = json.loads((tmp_path / "reliability.json").read_text())
    assert [(each["id"], each["value"]) for each in record["measures"]] == [("rel.storm", 3), ("rel.wire", 2)]
    assert list(record["details"]) == ["storm", "wire"] and "commit" in record["details"]["wire"]


@pytest.mark.parametrize(("num_frames", "num_parts"), [(100_000, 10), (6_000, 1), (300, 1)])
def test_sessions_send_no_fewer_frames_than_are_wanted(num_frames: int, num_parts: int) -> None:
    num_sessions = num_parts * len(TENANTS) * SESSIONS_A_TENANT
    assert 0 <= frames_of_session(num_frames, num_parts) * num_sessions - num_frames < num_sessions


def a_log(token_s: list[float], rounds: list[tuple[float, float, int]], error: str = "") -> EdgeLog:
    return EdgeLog(0.0, token_s, rounds, error=error)


def test_goodput_counts_rounds_in_time_and_a_session_without_a_token_starved() -> None:
    busy = a_log([1.0, 5.0, 9.0, 13.0], [(5.0, 0.1, 4), (9.0, 0.2, 4), (13.0, 0.5, 4)])
    figures = summarise([busy, a_log([1.0], [])], seconds=10.0)  # from 4 to 14 s
    assert (figures["goodput"], figures["p99_ms"], figures["longest_pause_s"]) == (0.2, 500.0, 10.0)
    assert figures["starved"] == 1
    goodput, slower, pause = judge(1, {**figures, "starved": 0}, figures)
    assert (goodput.met, slower.met, pause.met) == (True, True, False)


def test_growth_is_that_of_an_hour_between_the_medians_of_the_thirds() -> None:
    samples = [(60.0 * minute, {"MiB": 100.0 + minute}) for minute in range(30)]
    assert growth_percent(samples, "MiB") == pytest.approx(100 * 20 / 104.5 * 3, rel=0.01)
    assert growth_percent([(t, {"MiB": 7.0}) for t, _ in samples], "MiB") == 0.0


def test_growth_is_that_of_medians_an_hour() -> None:
    steady = [(60.0 * minute, {"files": 17.0 + (minute * 7) % 5}) for minute in range(30)]
    assert growth_percent(steady, "files") == 0
    leaking = [(at_s, {"files": each["files"] + at_s / 600}) for at_s, each in steady]
    assert growth_percent(leaking, "files") == pytest.approx(100 * 6 / 19.5, rel=0.15)
    spiked = [(at_s, {"files": each["files"] + 90 * (at_s > 1700)}) for at_s, each in steady]
    assert growth_percent(spiked, "files") == 0


def test_the_error_of_growth_is_how_much_it_varies_from_run_to_run() -> None:
    def run(seed: int) -> list[tuple[float, dict[str, float]]]:
        noise = random.Random(seed)
        return [(20.0 * number, {"MiB": noise.gauss(130.0, 1.9)}) for number in range(157)]

    runs = [run(seed) for seed in range(200)]
    varying = statistics.stdev(growth_percent(each, "MiB") for each in runs)
    assert statistics.fmean(growth_error_percent(each, "MiB") for each in runs) == pytest.approx(
        varying, rel=0.2
    )
    assert growth_error_percent(runs[0][:2], "MiB") == 0.0
