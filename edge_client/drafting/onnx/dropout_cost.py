"""Measures the time that MC dropout adds to a drafted token, on the draft that was loaded."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from outrider.edge_client.drafting.onnx.dropout import DropoutPlan, top_variance
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.spec import DraftSpec

_NUM_WARM, _NUM_TIMED = 2, 7


@dataclass(frozen=True, slots=True)
class DropoutCost:
    """Holds medians of a few steps at the beginning of a sequence, with masks and without in turn."""

    plain_ms: float
    extra_ms: float  # masks, branch and variance

    @property
    def ratio(self) -> float:
        """Returns a step's time with dropout over one without."""
        return (self.plain_ms + self.extra_ms) / self.plain_ms


def measure_cost(session: Any, spec: DraftSpec, plan: DropoutPlan) -> DropoutCost:
    """Returns the cost; `session` runs the variant. Without masks its branch does nothing, which measures the
    plain draft."""
    varied = OnnxRunner(session, spec, 1.0, plan)
    plain = OnnxRunner(session, spec, 1.0, replace(plan, num_samples=0, num_candidates=0))
    plain_ms, extra_ms = [], []
    for _ in range(_NUM_WARM + _NUM_TIMED):
        start_s = time.perf_counter()
        plain.feed([0], 0)
        middle_s = time.perf_counter()
        rows = varied.feed([0], 0)
        assert rows.candidates is not None
        top_variance(rows.candidates)
        end_s = time.perf_counter()
        plain_ms.append((middle_s - start_s) * 1e3)
        extra_ms.append((end_s - middle_s - (middle_s - start_s)) * 1e3)
    return DropoutCost(*(statistics.median(each[_NUM_WARM:]) for each in (plain_ms, extra_ms)))
