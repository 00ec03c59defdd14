"""`make bench-real`, stage `policies`: which points, which candidates, and what runs come to."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.controller.bank import bank
from benchmarks.real import policies, running
from benchmarks.real import run as real_run
from benchmarks.real.cases import (
    AGAIN,
    CLOUD_ONLY,
    DEFAULT,
    LENGTHS,
    OPTIMAL,
    PIPELINE_ON,
    PIPELINED,
    SYNCHRONOUS,
    Candidates,
    Comparison,
    cases_at,
    comparisons,
    name_candidates,
)
from benchmarks.real.judging import JudgedPoint, a_a_ratio, is_choosing, judge, next_rerun, still_needed
from benchmarks.real.points import (
    BLOCK,
    PAIRS,
    USELESS,
    PointOptions,
    RealPoint,
    draw_points,
    parse_numbers,
)
from benchmarks.real.virtual import virtual_ms
from outrider.common.errors import UsageError
from outrider.experiments.shared.acceptance_traces import find_traces
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.sweep.config.settings import make_edge_config
from outrider.models import EMBEDDED

POINT = RealPoint(1, "tables", "trained", 0.0, 8, 20.0, 0.0, 0.0, True)
CANDIDATES = Candidates(SYNCHRONOUS[:2], PIPELINED[:1])
DEFAULTS = (DEFAULT.name, AGAIN.name)


# ---------------------------------------------------------------------------------------------- points


def test_a_seed_draws_the_same_points_and_fewer_are_the_first_of_them() -> None:
    assert draw_points(8) == draw_points(BLOCK)[:8] == draw_points(3 * BLOCK)[:8]
    assert draw_points(BLOCK) != draw_points(BLOCK, seed=20)
    assert [point.number for point in draw_points(3)] == [1, 2, 3]


def test_a_block_of_points_has_every_pair_length_and_temperature_alike() -> None:
    points = draw_points(BLOCK)
    assert Counter((point.target, point.draft) for point in points) == {
        pair: 4 if pair == USELESS else 2 for pair in PAIRS
    }
    assert Counter(point.num_tokens for point in points) == {32: 8, 100: 8, 400: 8}
    assert Counter(point.temperature for point in points) == {0.0: 8, 0.7: 8, 1.0: 8}
    assert Counter(point.is_first for point in points) == {True: 12, False: 12}


def test_loopback_and_copied_drafts_are_not_stretched_and_long_texts_less() -> None:
    points = draw_points(10 * BLOCK)
    assert not any(point.min_forward_ms or point.min_draft_ms for point in points if point.is_near)
    assert not any(point.min_draft_ms for point in points if point.draft == "prompt-lookup")
    assert {point.min_forward_ms for point in points if point.num_tokens == 400} == {0.0, 30.0}
    assert {point.min_forward_ms for point in points if point.num_tokens == 100} == {0.0, 30.0, 70.0}


def test_every_point_has_recorded_acceptance_with_times() -> None:
    for point in draw_points(BLOCK)[::5]:
        assert find_traces(point.traces).times


def test_numbers_of_points_are_lists_and_ranges() -> None:
    assert parse_numbers("") == ()
    assert parse_numbers("3,5-7") == (3, 5, 6, 7)
    for wrong in ("x", "0-3", "3-", "1;2"):
        with pytest.raises(UsageError, match="--at"):
            parse_numbers(wrong)


def test_a_bank_that_is_not_built_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "RUN", tmp_path)
    with pytest.raises(UsageError, match="make pair-bank"):
        next(policies.run(PointOptions(1), {}))


# ------------------------------------------------------------------------------------------ candidates


def test_candidates_are_the_fastest_length_and_clearly_other_ones() -> None:
    times = {f"synchronous {n}": abs(n - 5) + 10.0 for n in LENGTHS}
    times |= {f"pipelined {n}": 30.0 - n for n in LENGTHS}
    found = name_candidates(times)
    assert [case.name for case in found.synchronous] == ["synchronous 5", "synchronous 3", "synchronous 8"]
    assert [case.name for case in found.pipelined] == ["pipelined 16", "pipelined 10"]
    assert found.names[-1] == "cloud-only"


def test_every_case_is_taken_by_the_edge_and_the_policies_are_what_they_say() -> None:
    configs = {
        case.name: make_edge_config(case.settings) for case in (*cases_at(CANDIDATES, False), PIPELINE_ON)
    }
    assert configs["default"].depth_policy == configs["optimal"].depth_policy == "optimal"
    assert configs["synchronous 2"].depth_policy == "fixed"
    assert configs["pipelined 1"].depth.num_speculative_tokens == 1
    assert str(configs["pipeline auto"].pipelining.use) == "auto" and str(configs["default"].mode) == "auto"


def test_on_loopback_nothing_is_compared_with_pipelined_rounds_of_the_optimal_length() -> None:
    assert PIPELINE_ON not in cases_at(CANDIDATES, True) and PIPELINE_ON in cases_at(CANDIDATES, False)
    near, far = ({each.id: each.others for each in comparisons(CANDIDATES, where)} for where in (True, False))
    assert near["pipeline_auto"] == (OPTIMAL.name,)
    assert far["pipeline_auto"] == (OPTIMAL.name, PIPELINE_ON.name)
    assert near["auto"] == ("synchronous 1", "synchronous 2", "pipelined 1", "cloud-only")


def test_virtual_time_ranks_the_cases_of_a_point() -> None:
    times = bank()[POINT.traces].times
    assert times is not None
    found = virtual_ms(POINT, (CLOUD_ONLY, *SYNCHRONOUS[:1]), times)
    # A round trip of 20 ms for two tokens at most, and a stream that pays none.
    assert found["synchronous 1"] > 10 > found["cloud-only"] > 0
    later = virtual_ms(replace(POINT, is_first=False), (CLOUD_ONLY,), times)
    assert later["cloud-only"] == pytest.approx(found["cloud-only"], rel=0.3)


# ----------------------------------------------------------------------------------------- comparisons


def test_half_of_the_runs_choose_and_the_other_half_compare() -> None:
    runs = {
        "default": {0: 10.0, 1: 10.0, 2: 10.0, 3: 10.0},
        "default again": {0: 10.0, 1: 12.5, 2: 10.0, 3: 12.5},
        "x": {0: 8.0, 1: 20.0, 2: 8.0, 3: 20.0},  # the best of the half that chooses, by luck
        "y": {0: 9.0, 1: 9.0, 2: 9.0, 3: 9.0},
    }
    assert [is_choosing(turn) for turn in range(4)] == [True, False, True, False]
    found = judge(runs, Comparison("auto", DEFAULTS, ("x", "y")))
    assert (found.chosen, found.ratio) == ("x", pytest.approx(20 / 11.25))
    assert a_a_ratio(runs) == pytest.approx(1.25)
    left_out = {**runs, "x": {0: 8.0, 1: 20.0}}
    assert judge(left_out, Comparison("auto", DEFAULTS, ("x", "y"))).chosen == "y"
    only = judge(runs, Comparison("never_slower", ("default",), ("y",)))
    assert (only.chosen, only.ratio) == ("y", pytest.approx(0.9))


def test_turns_end_with_the_budget_which_long_texts_over_loopback_have_more_of() -> None:
    assert running.has_time(0, 0.0, 0.0, budget_s=0.0)
    assert running.has_time(2, 119.0, 119.0, budget_s=60.0) and not running.has_time(
        2, 230.0, 230.0, budget_s=60.0
    )
    assert running.has_time(4, 20.0, 10.0, budget_s=60.0) and not running.has_time(
        4, 55.0, 10.0, budget_s=60.0
    )
    assert not running.has_time(running.MAX_TURNS, 1.0, 0.1, budget_s=60.0)
    near = replace(POINT, rtt_ms=0.0, num_tokens=400)
    assert running.budget_of(near) == 480 and running.budget_of(replace(near, num_tokens=32)) == 120
    assert running.budget_of(replace(near, rtt_ms=1.0)) == 120


def test_a_busy_moment_decides_nothing() -> None:
    runs = {"default": dict.fromkeys(range(16), 10.0), "x": dict.fromkeys(range(16), 9.0)}
    runs["default"] |= {3: 100.0, 7: 35.0}
    runs["x"] |= {5: 80.0}
    assert judge(runs, Comparison("auto", ("default",), ("x", "x"))).ratio == pytest.approx(0.9)


def test_what_is_much_slower_than_the_fastest_needs_no_more_runs() -> None:
    compared = [
        Comparison("auto", ("default",), ("fast", "near", "slow")),
        Comparison("never_slower", ("default",), ("slow",)),
    ]
    early = {"default": 2 * [10.0], "fast": 2 * [6.0], "near": 2 * [7.0], "slow": 2 * [15.0]}
    runs = {name: dict(enumerate(ms)) for name, ms in early.items()}
    assert still_needed(runs, compared) == {"default", "fast", "near", "slow"}
    runs = {name: dict(enumerate(2 * ms)) for name, ms in early.items()}
    assert still_needed(runs, compared) == {"default", "fast", "near"}


def _point(number: int, ratio: float, a_a: float, num_reruns: int = 0, **others: float) -> JudgedPoint:
    return JudgedPoint(number, {"auto": ratio, **others}, a_a, num_reruns)


def test_the_worst_point_of_a_measure_is_measured_again_until_it_equals_itself() -> None:
    assert next_rerun([]) is None
    assert next_rerun([_point(1, 0.9, 1.03), _point(2, 0.95, 1.5)]) == 1
    assert next_rerun([_point(1, 0.9, 0.97), _point(2, 0.95, 1.0)]) == 1
    assert next_rerun([_point(1, 0.9, 1.019), _point(2, 0.95, 1.5)]) is None
    assert next_rerun([_point(1, 0.9, 1.03, num_reruns=2), _point(2, 0.95, 1.5)]) is None
    assert next_rerun([_point(1, 0.9, 1.0), _point(2, 0.95, 1.5, optimal=0.8)]) == 2


@pytest.mark.slow
@pytest.mark.ci
def test_a_point_runs_in_real_processes_and_all_cases_write_the_same_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = running.BuiltPair(
        str(EMBEDDED / "target"), str(EMBEDDED / "draft"), "model", load_prompts(limit=3)
    )
    monkeypatch.setattr(running, "find_pair", lambda point: pair)
    point = replace(POINT, temperature=0.7, rtt_ms=2.0, is_first=False)
    compared = (
        Comparison("auto", DEFAULTS, ("synchronous 2", "cloud-only")),
        Comparison("never_slower", DEFAULTS, ("cloud-only",)),
    )
    cases = (DEFAULT, AGAIN, CLOUD_ONLY, SYNCHRONOUS[1])
    runs = running.run_point(point, cases, compared, budget_s=0.0)
    assert (runs.num_turns, runs.num_other_texts, len(runs.load_averages)) == (2, 0, 2)
    assert [*runs.ms["default"]] == [*runs.ms["synchronous 2"]] == [0, 1] and judge(
        runs.ms, compared[0]
    ).ratio > 0
    words = running.describe_case(runs.seen["synchronous 2"], runs.ms["synchronous 2"])
    assert "ms a token in" in words and "accepted" in words
    assert sum(each["num_tokens"] for each in (a["request"] for a in runs.seen["default"])) == 2 * 8
    assert running.describe_stretches(runs.seen["default"][0]).split()[0] in (
        "speculative",
        "cloud-only",
        "pipelined",
    )


# --------------------------------------------------------------------------------------------- results


def _found(point: RealPoint, ratio: float, a_a: float = 1.0, num_reruns: int = 0) -> dict[str, Any]:
    ids = ("auto", "never_slower", "optimal", "pipeline_auto")
    return {
        "settings": {"number": point.number, "num_tokens": point.num_tokens, "rtt_ms": point.rtt_ms},
        "ratios": dict.fromkeys(ids, ratio),
        "against": dict.fromkeys(ids, "x"),
        "a_a": a_a,
        "num_reruns": num_reruns,
        "num_other_texts": 0,
    }


def test_measures_follow_each_point_and_a_rerun_replaces_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def measure_point(point: RealPoint) -> dict[str, Any]:
        calls.append(point.number)
        is_again = calls.count(point.number) > 1
        return _found(point, 0.98 if is_again else 1 - point.number / 100, 1.0 if is_again else 1.05)

    monkeypatch.setattr(policies, "measure_point", measure_point)
    monkeypatch.setattr(policies, "find_pair", lambda point: None)
    *_, (measures, details) = policies.run(PointOptions(3), {})
    assert calls[:4] == [
        1,
        2,
        3,
        3,
    ]  # the worst again; others are the worst of lengths and links of their own
    assert len(calls) == len(set(calls[:3])) + len(calls[3:]) and len(calls) <= 6
    assert details["points"]["3"]["num_reruns"] == 1
    by_id = {measure.id: measure for measure in measures}
    assert by_id["real.auto"].met and by_id["real.other_texts"].value == 0
    assert by_id["real.auto_worst"].value == min(
        each["ratios"]["auto"] for each in details["points"].values()
    )


def test_points_that_are_not_asked_for_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"points": {"1": _found(draw_points(1)[0], 0.5)}}
    monkeypatch.setattr(policies, "measure_point", lambda point: _found(point, 1.0))
    monkeypatch.setattr(policies, "find_pair", lambda point: None)
    ((measures, details),) = policies.run(PointOptions(numbers=(2,)), before)
    assert {measure.id: measure.value for measure in measures}["real.auto"] == 0.75
    assert list(details["points"]) == ["1", "2"]
    ((_, details),) = policies.run(PointOptions(1), before)
    assert details["points"]["1"]["ratios"]["auto"] == 1.0


def test_a_stretch_has_its_measured_time_beside_the_expected_ones() -> None:
    answer = {
        "stretches": [
            {"mode": "speculative", "start": 0, "expected_ms": {"speculative": 2.0, "cloud-only": 9.0}},
            {"mode": "cloud-only", "start": 3, "expected_ms": {"speculative": 8.0, "cloud-only": 5.0}},
        ],
        "request": {"token_times_ms": [0.0, 4.0, 8.0, 14.0, 20.0]},
    }
    assert running.describe_stretches(answer) == (
        "speculative 2 at 4.00 (speculative 2.0, cloud-only 9.0); "
        "cloud-only 2 at 6.00 (speculative 8.0, cloud-only 5.0)"
    )


def test_every_stage_is_a_module_that_runs() -> None:
    for module in real_run.STAGES.values():
        assert callable(importlib.import_module(f"benchmarks.real.{module}").run)
    assert "vs_hf_assisted" in real_run.STAGES
