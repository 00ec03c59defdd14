"""What signals cost and what they are worth: the parts of both commands that need no large draft."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.controller.signals import Cost, make_measures, measure_draft
from benchmarks.pair.draft import EMBEDDED_DRAFT
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.dropout_quality import NAMES, auc, judge_texts


def test_each_cost_is_of_the_draft_with_and_without() -> None:
    costs = measure_draft(EMBEDDED_DRAFT, num_rounds=2)
    assert set(costs) == {"signals greedy", "signals sampled", "dropout greedy", "dropout sampled"}
    assert all(cost.plain_ms > 0 for cost in costs.values())


def test_the_measures_are_judged_by_the_issues_targets() -> None:
    small = dict.fromkeys(("signals greedy", "signals sampled", "dropout sampled"), Cost(0.2, 0.06, 0.0))
    large = {name: Cost(10.0, 0.5, 0.0) for name in small}
    found = {measure.id: measure for measure in make_measures(small, large)}
    assert (found["ctl.signals_greedy"].met, found["ctl.signals_sampled"].met) == (False, True)
    assert (found["ctl.signals"].value, found["ctl.signals"].met) == (0.05, True)
    assert found["ctl.mc_dropout"].value == pytest.approx(1.3)


def test_auc_is_the_chance_that_what_fell_looks_worse() -> None:
    has_fallen = np.array([True, False, True, False])
    assert auc(np.array([4.0, 1.0, 3.0, 2.0]), has_fallen) == 1
    assert auc(np.array([2.0, 1.0, 3.0, 4.0]), has_fallen) == 0.5


def test_every_position_of_a_text_is_judged_by_every_signal() -> None:
    with OnnxDraftModel.open(EMBEDDED_DRAFT, has_variance=True) as model:
        signals, has_fallen = judge_texts(model, [((5, 6, 7), (8, 9, 10, 11))], SamplingParams(seed=1))
    assert signals.shape == (3, len(NAMES)) and has_fallen.shape == (3,)
