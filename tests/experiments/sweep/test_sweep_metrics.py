"""What rows come to: each metric on numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from sweep_rows import make_request, make_round, make_visit

from outrider.experiments.shared.verifier_metrics import MemoryPeaks
from outrider.experiments.sweep.config.schema import Slo
from outrider.experiments.sweep.results import intervals
from outrider.experiments.sweep.results.metrics import (
    DESCRIPTIONS,
    Observed,
    acceptance_by_position,
    compute_metrics,
    describe,
    meets,
    unit_of,
)
from outrider.experiments.sweep.results.records import RequestRow

NO_SLO = Slo(None, None, None)


def metrics_of(
    *requests: RequestRow, rounds: Any = (), visits: Any = (), slo: Slo = NO_SLO
) -> dict[str, Any]:
    found = compute_metrics(Observed(requests, rounds, visits), slo, price_per_hour=3.6)
    assert all(metric.unit == unit_of(name) and describe(name) for name, metric in found.items())
    return {name: pytest.approx(metric.value, rel=1e-5) for name, metric in found.items()}


def request_of(origins: list[str], **changes: Any) -> RequestRow:
    """A token each, 1 ms apart."""
    times = [1.0 + index for index in range(len(origins))]
    return make_request(token_times_ms=times, token_origins=origins, **changes)


def test_times_are_means_over_requests_in_ms() -> None:
    found = metrics_of(
        make_request(token_times_ms=[10.0, 20.0, 40.0]), make_request(token_times_ms=[30.0, 40.0])
    )
    assert found["ttft_ms"] == 20.0
    assert found["tpot_ms"] == (15.0 + 10.0) / 2
    assert found["total_ms"] == 40.0
    assert found["otps"] == (3 / 0.040 + 2 / 0.040) / 2


def test_tokens_of_one_commit_have_no_gap_and_commits_have() -> None:
    row = make_request(token_times_ms=[10.0, 20.0, 20.0, 20.0, 50.0], commit_times_ms=[10.0, 20.0, 50.0])
    found = metrics_of(row)
    assert (found["itl_p50_ms"], found["itl_p99_ms"]) == (0.0, 30.0)
    assert (found["commit_gap_p50_ms"], found["commit_gap_p95_ms"]) == (10.0, 30.0)


def test_goodput_counts_the_tokens_of_requests_that_keep_every_limit() -> None:
    good, slow = make_request(prompt="a"), make_request(prompt="b", token_times_ms=[10.0, 90.0])
    visits = [make_visit(wall_s=0.5, num_tokens=4)]
    found = metrics_of(good, slow, visits=visits, slo=Slo(ttft_ms=15, tpot_ms=50, commit_gap_p95_ms=None))
    assert found["goodput_share"] == 0.5
    assert found["goodput_tokens_per_s"] == 2 / 0.5
    assert found["tokens_per_s"] == 4 / 0.5
    assert not meets(good, Slo(ttft_ms=5, tpot_ms=None, commit_gap_p95_ms=None))
    assert not meets(slow, Slo(ttft_ms=None, tpot_ms=None, commit_gap_p95_ms=70))


@pytest.mark.parametrize("gaps", [[100.0, 5000.0], [*[100.0] * 9, 5000.0]])
def test_a_limit_of_the_p95_gap_is_judged_by_the_metric_of_that_name(gaps: list[float]) -> None:
    row = make_request(token_times_ms=[10.0, *(10.0 + sum(gaps[: i + 1]) for i in range(len(gaps)))])
    assert metrics_of(row)["commit_gap_p95_ms"] == 5000.0
    assert not meets(row, Slo(ttft_ms=None, tpot_ms=None, commit_gap_p95_ms=250))


def test_goodput_after_a_visit_that_was_interrupted_counts_no_tokens_without_their_time() -> None:
    whole, cut = make_request(prompt="a"), make_request(prompt="b")  # whose visit has no row
    found = metrics_of(whole, cut, visits=[make_visit(wall_s=0.5, num_tokens=2)])
    assert found["goodput_tokens_per_s"] == found["tokens_per_s"] == 2 / 0.5


def test_acceptance_is_told_by_position_given_those_before_and_cumulated() -> None:
    rounds = [make_round(4, 4), make_round(4, 1), make_round(4, 0), make_round(2, 2)]
    alphas, a_cum = acceptance_by_position(rounds)
    assert alphas == [0.75, round(2 / 3, 4), 1.0, 1.0]
    assert a_cum == [0.75, 0.5, round(1 / 3, 4), round(1 / 3, 4)]
    unanswered = make_round(8, 0, is_answered=False)
    assert acceptance_by_position([*rounds, unanswered]) == (alphas, a_cum)


def test_the_verifiers_share_and_its_cost_are_per_token() -> None:
    row = make_request(forward_s=0.02, cloud_draft_s=0.01, verifier_calls=1)
    found = metrics_of(row)
    assert found["verifier_calls_per_token"] == 0.5
    assert found["forward_s_per_token"] == 0.01
    assert found["cost_per_million_tokens"] == 0.03 / 2 * 1e6 * 3.6 / 3600


def test_rounds_and_bytes_and_marks_are_ratios_of_sums() -> None:
    row = request_of(
        ["target", "accepted", "correction", "fallback"],
        num_rounds=1,
        num_draft_tokens=4,
        num_accepted_tokens=1,
        num_unverified_tokens=1,
        num_fallback_tokens=1,
        num_timeouts=1,
    )
    found = metrics_of(row, visits=[make_visit(num_tokens=4, wire_bytes_up=400, wire_bytes_down=800)])
    assert (found["acceptance_rate"], found["tokens_per_round"]) == (0.25, 2.0)
    assert (found["bytes_up_per_token"], found["bytes_down_per_token"]) == (25.0, 50.0)
    assert (found["wire_bytes_up_per_token"], found["wire_bytes_down_per_token"]) == (100.0, 200.0)
    assert (found["unverified_share"], found["fallback_share"]) == (0.25, 0.25)
    assert found["timeouts_per_request"] == 1.0


def test_a_gates_blocks_and_tokens_are_counted_where_one_judged() -> None:
    row = request_of(
        ["target", "gate", "gate", "correction"], num_unverified_tokens=2, num_rolled_back_tokens=1
    )
    kept = make_round(2, 0, is_answered=False, kept=True, hard_ratio=0.0, escalated=False)
    sent = make_round(4, 0, hard_ratio=0.5, escalated=True)
    found = metrics_of(row, rounds=[kept, sent])
    assert (found["gate_share"], found["unverified_share"], found["rolled_back_share"]) == (0.5, 0.5, 0.25)
    assert (found["hard_share"], found["escalated_share"]) == (0.25, 0.5)
    assert found["round_forward_ms"] == 6.0, "a kept block is no round"
    assert "gate_share" not in metrics_of(make_request(), rounds=[make_round(4, 2)])


def test_a_round_is_taken_apart() -> None:
    found = metrics_of(make_request(), rounds=[make_round(4, 2)])
    parts = [found[f"round_{part}_ms"] for part in ("draft", "net", "queue", "forward", "other")]
    assert parts == [4.0, 12.0, 1.0, 6.0, 1.0]
    assert found["round_ms"] == 24.0


def test_what_was_not_measured_is_absent_never_zero() -> None:
    found = metrics_of(make_request(verifier_calls=0, bytes_up=0, bytes_down=0))
    absent = ("wire_bytes_up_per_token", "energy_j_per_token", "edge_peak_rss_mb", "acceptance_rate")
    assert not [name for name in (*absent, "bytes_up_per_token", "forward_s_per_token") if name in found]
    seen = Observed([make_request()], [], [make_visit(energy_j=3.0, edge_peak_rss_bytes=5_000_000)])
    there = compute_metrics(seen, NO_SLO, None)
    assert (there["energy_j_per_token"].value, there["edge_peak_rss_mb"].value) == (1.5, 5.0)
    assert "cost_per_million_tokens" not in there
    assert not [name for name in there if "gpu" in name or "kv_peak" in name]


def test_the_largest_memory_of_all_visits_counts() -> None:
    sizes = [asdict(MemoryPeaks(64, 0.1)), asdict(MemoryPeaks(96, 0.15, 5_000_000, 7_000_000))]
    seen = Observed([make_request()], [], [make_visit(verifier_memory=size) for size in (*sizes, {})])
    found = compute_metrics(seen, NO_SLO, None)
    assert (found["verifier_kv_peak_tokens"].value, found["verifier_kv_peak_share"].value) == (96, 0.15)
    assert (found["gpu_peak_allocated_mb"].value, found["gpu_peak_reserved_mb"].value) == (5.0, 7.0)


def test_nothing_of_an_empty_sweep_is_measured() -> None:
    assert compute_metrics(Observed([], [], []), NO_SLO, None) == {}


def test_a_request_of_one_token_or_none_breaks_nothing() -> None:
    found = metrics_of(make_request(token_times_ms=[5.0]), make_request(token_ids=[], token_times_ms=[]))
    assert found["ttft_ms"] == 5.0 and "tpot_ms" not in found


def test_metrics_are_json_with_intervals() -> None:
    rows = [make_request(repeat=r, token_times_ms=[10.0, 20.0 + r]) for r in range(5)]
    metric = compute_metrics(Observed(rows, [], []), NO_SLO, None)["tpot_ms"]
    assert metric.low is not None and metric.high is not None
    assert metric.low <= metric.value <= metric.high and metric.n == 5
    json.dumps([metric.low, metric.high], allow_nan=False)


def test_every_name_has_a_unit_and_a_sentence() -> None:
    assert all(unit and text for unit, text in DESCRIPTIONS.values())
    assert unit_of("itl_p99_ms") == "ms" and describe("commit_gap_p50_ms").startswith("gap")


# ---------------------------------------------------------------------------------------- intervals


def test_an_interval_of_a_mean_is_that_of_the_theory_within_a_tenth() -> None:
    values = np.random.default_rng(3).normal(10, 2, 400)
    mean, interval = intervals.of_mean(list(values))
    assert interval is not None
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        _, interval = intervals.of_mean(list(rng.exponential(1.0, 40)))
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]
    assert 86 <= hits <= 99


def test_intervals_are_the_same_every_time_and_none_for_one_request() -> None:
    assert intervals.of_mean([1.0, 2.0, 4.0]) == intervals.of_mean([1.0, 2.0, 4.0])
    assert intervals.of_mean([3.0]) == (3.0, None)
    assert intervals.of_ratio([1.0], [2.0]) == (0.5, None)
    assert intervals.of_ratio([1.0], [0.0]) is None
    assert intervals.of_quantiles([], [0.5]) is None


def test_a_ratio_of_pairs_that_keep_step_is_certain_where_each_alone_is_not() -> None:
    base = [1.0, 5.0, 9.0, 2.0]
    result = intervals.of_ratio([2 * value for value in base], base)
    assert result is not None and result == (2.0, (2.0, 2.0))


def test_quantiles_weigh_every_gap_and_draw_whole_requests() -> None:
    groups = [[1.0] * 90, [100.0] * 10]
    found = intervals.of_quantiles(groups, [0.5, 0.95])
    assert found is not None
    assert [value for value, _ in found] == [1.0, 100.0]
    assert found[0][1] == (1.0, 100.0)  # either request may be drawn twice
    expected = np.quantile(np.concatenate([np.asarray(g) for g in groups]), 0.9, method="inverted_cdf")
    assert intervals.of_quantiles(groups, [0.9])[0][0] == expected  # type: ignore[index]


def test_the_acceptance_of_trees_is_that_of_their_likeliest_paths_and_bytes_are_by_node() -> None:
    tree = make_round(16, 5, main_path=[1, 4], bytes_up=80)
    chain = make_round(4, 3, bytes_up=20)
    request = make_request(num_rounds=2, num_draft_tokens=20, num_accepted_tokens=8)
    found = compute_metrics(Observed([request], [tree, chain], []), Slo(), None)
    assert found["acceptance_rate"].value == pytest.approx((1 + 3) / (4 + 4))
    assert found["draft_tokens_per_round"].value == 10 and found["tree_share"].value == 0.5
    assert found["bytes_up_per_draft_token"].value == pytest.approx(100 / 20)
    assert acceptance_by_position([tree, chain])[0] == [1.0, 0.5, 1.0, 0.0]
    assert "tree_share" not in compute_metrics(Observed([request], [chain], []), Slo(), None)
