"""Acceptance traces, and the figures that policies are judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.controller.run import FixedSweep, fixed_rounds, play_set, rounds_to_settle
from benchmarks.controller.simulated import Point, play_texts
from outrider.common.errors import UsageError
from outrider.edge_client.controller.cost_model import expected_tokens, round_s, tokens_per_s
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    RECORDED,
    TextTrace,
    TraceSet,
    load_traces,
    save_traces,
    synthetic_traces,
)


def make_text(runs: list[int], confidence: float = 0.5) -> TextTrace:
    return TextTrace(np.array(runs, np.uint8), np.full((len(runs), MAX_DEPTH), confidence, np.float32))


def test_a_round_begins_after_what_the_last_one_committed() -> None:
    # Runs by position; a round of 3 accepted tokens commits 4, and the last one must leave none over.
    assert [*fixed_rounds(make_text([9, 0, 0, 0, 1, 0, 0]), 3)] == [(3, 3), (1, 2), (0, 0)]


def test_played_rounds_take_what_the_cost_model_says() -> None:
    text, point = make_text([9, 0, 0, 0, 0, 1, 0, 0]), Point(60, 30, 2)
    ((played,),) = play_texts([[text]], point, ExecutionMode.SPECULATIVE, policy="fixed")
    rounds = [(each.num_accepted_tokens, each.num_draft_tokens) for each in played.stats.rounds]
    assert rounds == [*fixed_rounds(text, 4)] == [(4, 4), (1, 2), (0, 0)] and played.num_tokens == 8
    assert played.seconds == pytest.approx(sum(round_s(n, point.models, point.link) for _, n in rounds))


def test_a_runner_up_that_is_the_correction_is_sent_as_a_branch_and_hit() -> None:
    runs = np.array([2, 1, 0] * 40, np.uint8)
    gaps, seconds = np.full(120, 0.01, np.float32), np.ones(120, bool)
    text = TextTrace(runs, np.zeros((120, 0), np.float32), gaps, seconds)
    orders, point = [[text]], Point(200, 5, 0.2)
    ((branching,),) = play_texts(orders, point, ExecutionMode.PIPELINED)
    ((plain,),) = play_texts(orders, point, ExecutionMode.PIPELINED, has_branches=False)
    assert branching.stats.num_guess_hits > 20 and plain.stats.num_guessed_rounds == 0
    assert branching.seconds < 0.7 * plain.seconds


def test_traces_survive_the_file(tmp_path: Path) -> None:
    sets = [
        TraceSet("a", "recorded", (make_text([3, 0, 64], 20 / 63), make_text([1], 1.0))),
        TraceSet("b", "synthetic", (make_text([2, 2], 0.0),)),
    ]
    save_traces(tmp_path / "deep" / "t.npz", sets)
    for found, wanted in zip(load_traces(tmp_path / "deep" / "t.npz"), sets, strict=True):
        assert (found.name, found.label) == (wanted.name, wanted.label)
        for a, b in zip(found.texts, wanted.texts, strict=True):
            assert a.runs.tolist() == b.runs.tolist()
            np.testing.assert_allclose(a.confidences, b.confidences, atol=1e-6)


def test_a_file_without_traces_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_text("no")
    for path in (tmp_path / "t.npz", tmp_path / "none.npz"):
        with pytest.raises(UsageError, match=str(path)):
            load_traces(path)


def test_the_recorded_file_holds_the_embedded_pair_at_both_temperatures() -> None:
    sets = load_traces()
    assert [(s.name, s.label) for s in sets] == [("embedded T=0.8", "recorded"), ("embedded T=0", "recorded")]
    assert RECORDED.stat().st_size < 300_000
    for traces in sets:
        assert [text.num_positions for text in traces.texts] == [128] * 16
        assert 0.7 < traces.acceptance_rate < 0.9


@pytest.mark.parametrize("confidence", ["none", "certain", "knows"])
def test_synthetic_traces_have_the_acceptance_they_say(confidence: str) -> None:
    traces = synthetic_traces(0.8, confidence, num_positions=1024)
    runs = np.concatenate([text.runs for text in traces.texts])
    assert np.minimum(runs, 4).mean() + 1 == pytest.approx(expected_tokens(0.8, 4), rel=0.02)
    assert traces.label == "synthetic"


def test_fixed_lengths_on_a_synthetic_trace_run_at_the_cost_models_rate() -> None:
    point = Point(60, 30, 2)
    traces = synthetic_traces(0.8, "none", num_positions=2048)
    assert 1 / FixedSweep(traces).tpot_s(6, point) == pytest.approx(
        tokens_per_s(0.8, 6, point.models, point.link), rel=0.02
    )


@pytest.mark.parametrize("num_texts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_optimal_comes_near_the_best_fixed_length_in_long_texts(num_texts: int) -> None:
    for alpha, confidence, bound in ((0.3, "none", 1.02), (0.8, "none", 1.05), (0.8, "knows", 1.02)):
        traces = synthetic_traces(alpha, confidence, num_texts=num_texts, num_positions=1024)
        sweep = FixedSweep(traces)
        for point in (Point(1, 5, 12), Point(60, 30, 2), Point(600, 30, 0.2)):
            tpot_s = play_set((traces, "optimal", point)).tpot_s(point)
            assert tpot_s / sweep.tpot_s(sweep.best(point), point) <= bound, (alpha, confidence, point)


def test_optimal_settles_soon_after_a_step_of_the_link() -> None:
    assert rounds_to_settle(0.8, 30, 2) <= 5
