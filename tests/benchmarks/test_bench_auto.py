"""The choice of the mode against each way alone: first texts of a process, and later ones."""

from __future__ import annotations

import pytest

from benchmarks.controller.auto import AutoRun, run_auto, run_later
from benchmarks.controller.simulated import Point
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import synthetic_traces

# Where a draft that is better than usual makes rounds the best way, and what is usual says the stream.
POINT = Point(600, 70, 2)


@pytest.fixture(scope="module")
def run() -> AutoRun:
    return run_auto((synthetic_traces(0.95, "none", num_texts=16, num_positions=128, seed=3), POINT))


def test_later_texts_of_a_process_need_not_learn_the_draft_anew(run: AutoRun) -> None:
    assert run.fixed_ms[ExecutionMode.PIPELINED] < 0.8 * run.fixed_ms[ExecutionMode.CLOUD_ONLY]
    assert run.ratio(is_later=True) < run.ratio(is_later=False) - 0.2


def test_every_text_counts_once_among_the_later_ones() -> None:
    traces = synthetic_traces(0.3, "none", num_texts=10, num_positions=32)
    assert run_later(traces, POINT).num_tokens == 10 * 32


def test_a_run_says_what_both_are(run: AutoRun) -> None:
    assert run.place == "alpha 0.95, confidence none RTT 600 forward 70 draft 2 ms"
    assert f"{run.ratio(False):.3f} of the best; later texts" in str(run)
