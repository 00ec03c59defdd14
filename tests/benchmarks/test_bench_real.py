"""`make bench-real`: what its stages make of what they see."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real import capacity, overhead, rss, start
from benchmarks.real.demo import size_gb
from benchmarks.real.echo import Busy, EchoClient, Exchange, start_echo
from benchmarks.real.overhead import RoundTimes, RunTimes, round_times
from outrider.common.types import SamplingParams
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.load.report import LoadReport, Tally
from outrider.models import EMBEDDED


def test_start_up_is_a_ratio_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    served, imported = iter([9.0, 3.0, 2.0, 4.0] * 3), iter([5.0, 2.0, 1.0, 2.0, 3.0, 2.0, 2.0] * 3)
    monkeypatch.setattr(start, "_serve_s", lambda _: next(served))
    monkeypatch.setattr(start, "_import_s", lambda _: next(imported))
    monkeypatch.setattr(start, "NUM_TURNS", 3)
    (measure,), details = start.run()
    assert (measure.id, measure.value) == ("real.start_tests", 1.5)
    assert (
        details["turns_s"] == [[2.0, 3.0, 1.0], [2.0, 2.0, 3.0], [2.0, 4.0, 2.0]]
        and details["imports_a_a"] == 1.0
    )


def test_resident_memory_is_read_in_megabytes() -> None:
    found = rss.resident_mb(Path("/proc/self/status").read_text())
    assert found["VmRSS"] >= max(found["RssAnon"], found["RssFile"]) > 0
    status = "Name:\tx\nVmRSS:\t  1000 kB\nRssAnon:\t 900 kB\nRssFile:\t 100 kB\n"
    assert rss.resident_mb(status) == {"VmRSS": 1.0, "RssAnon": 0.9, "RssFile": 0.1}


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(bytes(5000))
    before = size_gb(tmp_path)
    os.link(tmp_path / "sub" / "a", tmp_path / "b")
    assert size_gb(tmp_path) == before >= 5e-6


def test_an_echo_answers_every_exchange_and_its_pauses_are_taken_off() -> None:
    echo = start_echo(1 << 20)
    try:
        client = EchoClient(echo.address, 1 << 20)
        beyond_ms = client.beyond_ms([Exchange(50, 60, 0, 0), Exchange(12, 8, 10**6, 10**6)])
        client.close()
    finally:
        echo.stop()
    assert len(beyond_ms) == 2 and min(beyond_ms) > 0
    assert Busy(100).pause(1000) >= 1000


def test_the_drafts_runs_are_timed_where_they_happen() -> None:
    runs = RunTimes()
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        sequence = draft.sequence(SamplingParams(seed=1))
        sequence.commit([5, 6, 7])
        before_ns = time.perf_counter_ns()
        with runs.recording():
            sequence.propose(3)
        after_ns = time.perf_counter_ns()
        sequence.propose(3)
    assert 0 < runs.between_ms(before_ns, after_ns) <= (after_ns - before_ns) / 1e6
    assert runs.between_ms(after_ns, time.perf_counter_ns()) == 0


def test_a_round_is_taken_apart_from_the_tokens_before_it_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "NUM_WARM", 1)
    inside = {"draft_ms": 3.0, "rtt_ms": 6.0, "verifier_ms": 5.0, "forward_ms": 4.0}
    sizes = {"bytes_up": 55, "bytes_down": 65}
    records = [RoundRecord(n, overhead.DEPTH, n, **inside, **sizes) for n in (0, 2, 1)]
    times_ms = [0, 7, 17, 17, 17, 40]  # the opening's, one of the first round's, three of the second's
    stats = SimpleNamespace(rounds=records, token_times_ns=[int(each * 1e6) for each in times_ms])
    runs: Any = SimpleNamespace(between_ms=lambda start_ns, end_ns: 0.2 * (end_ns - start_ns) / 1e6)
    result: Any = SimpleNamespace(stats=stats)
    (times,) = round_times(result, runs)  # without the first one, and the last one, which was cut
    assert times == RoundTimes(10.0, 2.0, 3.0, 4.0, 5.0, 6.0, 55, 65)
    assert times.beyond == sum(times.parts.values()) == 4.0
    assert times.exchange == Exchange(50, 60, 2_000_000, 4_000_000)
    (measure,), details = overhead.report({0.0: [[times], [times]]}, [[1.0], [3.0]])
    assert (measure.id, measure.value, measure.met) == ("real.overhead", 2.0, True)
    assert (details["beyond_a_a"], details["echo_a_a"], details["num_rounds"]) == (1.0, 0.333, 2)


# ------------------------------------------------------------------------------------------- capacity


STEPS_S = {8: 0.010, 24: 0.012, 40: 0.015, 72: 0.020}  # by rows


def replayed(
    tokens_per_s: float, p95_ms: float = 20.0, tokens_per_round: float = 3.0, mean_drafted: float = 4.0
) -> LoadReport:
    return replace(
        Tally().report(0.0, 1.0, 0.4),
        tokens_per_s=tokens_per_s,
        worst_commit_gap_p95_ms=p95_ms,
        tokens_per_round=tokens_per_round,
        mean_drafted=mean_drafted,
    )


def reports_of(**speeds: float) -> dict[int, dict[str, list[LoadReport]]]:
    """Every way has 100 tokens a second but those given, by their names here; half as fast with 32 sessions."""
    names = {
        "two": "drafts of 2",
        "four": "drafts of 4",
        "own": capacity.OWN,
        "auto": capacity.AUTO,
        "there": "co-located, 4",
    }
    by_way = {names[name]: speed for name, speed in speeds.items()}
    return {
        number: {
            way: [replayed(by_way.get(way, 100.0) * turn * share, p95_ms=2.5 * number) for turn in (1.0, 1.1)]
            for way in capacity.ways()
        }
        for number, share in ((1, 1.0), (8, 1.0), (16, 1.0), (32, 0.5))
    }


def test_capacity_compares_the_best_length_with_cloud_only_and_with_what_steps_allow() -> None:
    found = {
        each.id: each
        for each in capacity.judge(reports_of(two=150, four=180, own=90, auto=99, there=140), STEPS_S)
    }
    assert (found["real.capacity8"].value, found["real.capacity8"].met) == (1.8, True)
    assert "drafts of 4 : cloud-only (A/A 1.000)" in found["real.capacity8"].measure
    assert found["real.capacity8_possible"].value == pytest.approx(1.8 / (3 * 0.010 / 0.015))
    against = found["real.capacity_vs_colocated"]
    assert (
        against.value == pytest.approx(180 / 140, abs=1e-4) and "1.29 with 8, 1.29 with 32" in against.measure
    )
    load = found["real.capacity_load"]
    assert (load.value, load.met) == (0.99, False)
    assert "0.99 with 1, 0.99 with 8, 0.99 with 16; rounds alone 0.90, of 4.0 tokens" in load.measure


def test_the_sessions_that_fit_are_the_most_of_which_all_fewer_fit_too() -> None:
    reports = reports_of()
    assert [capacity.num_within(reports, capacity.OWN, limit) for limit in (2, 2.5, 25, 39, 100)] == [
        0,
        1,
        8,
        8,
        32,
    ]
    reports[8][capacity.OWN] = [replayed(100.0, p95_ms=60.0)]
    assert capacity.num_within(reports, capacity.OWN, 50) == 1, "16 sessions would fit, 8 did not"


def test_the_table_has_a_line_for_each_number_of_sessions() -> None:
    table = capacity.table(reports_of(four=180))
    assert table["columns"][:4] == ["sessions", "drafts of 2", "drafts of 4", "drafts of 8"]
    assert [row[0] for row in table["rows"]] == ["1", "8", "16", "32"]
    assert table["rows"][1][2] == "189 (20, 0)" and table["rows"][3][2] == "94 (80, 0)"
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
