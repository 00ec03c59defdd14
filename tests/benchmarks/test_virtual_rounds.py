"""Acceptance traces and the clock that policies are judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.controller.grid import Point
from benchmarks.controller.run import FixedSweep, rounds_to_settle, run_set
from benchmarks.controller.virtual_rounds import VirtualRound, ms_per_token, replay
from outrider.common.errors import UsageError
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, expected_tokens, tokens_per_s
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.depth.optimal import OptimalDepth
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop, Stop
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    RECORDED,
    TextTrace,
    TraceSet,
    load_traces,
    save_traces,
    synthetic_traces,
)

MODELS = ModelCosts(draft_token_s=0.002, target_token_s=0.030, verify_fixed_s=0.030, verify_token_s=0.001)
LINK = LinkCosts(rtt_s=0.060)


def make_text(runs: list[int], confidence: float = 0.5) -> TextTrace:
    return TextTrace(np.array(runs, np.uint8), np.full((len(runs), MAX_DEPTH), confidence, np.float32))


class Keeping(FixedDepth):
    """Drafts 4 tokens, none after a second one; keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(4)
        self.seen: list[RoundRecord] = []

    def stop_rule(self) -> ShouldStop:
        return lambda token_id, signals, num_drafted: Stop.AFTER if num_drafted == 2 else Stop.NO

    def observe(self, record: RoundRecord) -> None:
        self.seen.append(record)


def test_rounds_go_on_behind_what_the_last_one_committed() -> None:
    # Runs by position; a round of 3 that all stand commits 4 tokens, and the last one must leave none over.
    rounds = replay(make_text([9, 0, 0, 0, 1, 0, 0]), FixedDepth(3), MODELS, lambda number: LINK)
    shapes = [(r.num_draft_tokens, r.num_accepted_tokens) for r in rounds]
    assert shapes == [(3, 3), (2, 1), (0, 0)]
    assert [r.total_s for r in rounds] == [pytest.approx(0.090 + 0.003 * n) for n in (3, 2, 0)]
    assert ms_per_token(rounds) == pytest.approx((99 + 96 + 90) / 7)


def test_a_policy_is_shown_what_a_session_would_show_it_and_may_end_drafts() -> None:
    policy = Keeping()
    rounds = replay(make_text([1, 0, 0, 0, 0, 0]), policy, MODELS, lambda number: LINK)
    assert [r.num_draft_tokens for r in rounds] == [2, 2, 2, 1, 0]
    first = policy.seen[0]
    assert (first.num_draft_tokens, first.num_accepted_tokens, first.confidences) == (2, 1, (0.5, 0.5))
    assert (first.draft_ms, first.net_ms, first.verifier_ms) == (
        pytest.approx(4),
        pytest.approx(60),
        pytest.approx(32),
    )


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
    totals = run_set(traces, lambda: FixedDepth(6), point)
    assert 1 / totals.tpot_s(point) == pytest.approx(tokens_per_s(0.8, 6, point.models, point.link), rel=0.02)


def test_optimal_comes_near_the_best_fixed_length_in_long_texts() -> None:
    for alpha, confidence, bound in ((0.3, "none", 1.02), (0.8, "none", 1.05), (0.8, "knows", 1.02)):
        traces = synthetic_traces(alpha, confidence, num_texts=2, num_positions=1024)
        sweep = FixedSweep(traces)
        for point in (Point(1, 5, 12), Point(60, 30, 2), Point(600, 30, 0.2)):
            tpot_s = run_set(traces, OptimalDepth, point).tpot_s(point)
            assert tpot_s / sweep.tpot_s(sweep.best(point), point) <= bound, (alpha, confidence, point)


def test_optimal_settles_soon_after_a_step_of_the_link() -> None:
    assert rounds_to_settle(0.8, 30, 2) <= 5


def test_a_round_is_its_parts() -> None:
    assert ms_per_token([VirtualRound(4, 1, 0.1), VirtualRound(0, 0, 0.05)]) == pytest.approx(50)
