"""The choice of the mode in virtual time, against each way alone: `ctl.auto`.

It is measured twice over the same texts: each as the first of a process, which knows nothing of the draft,
and after others, in processes that serve eight texts and the first two of them again, of which the last eight
count. A process is an edge of the simulator (`simulated`), whose sessions share the product's acceptance
prior.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.pool import fresh_processes
from benchmarks.controller.simulated import MODE_POINTS, Point, play_texts
from benchmarks.controller.ways import Total, run_mode, total_of
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import TraceSet
from outrider.experiments.shared.results import Measure, at_most, judged

TARGET = 1.05
NUM_BEFORE = 2  # texts of a process that do not count as later ones
NUM_COUNTED = 8
_TEXTS = ("first texts", "later texts")  # by is_later


@dataclass(frozen=True, slots=True)
class AutoRun:
    """Holds `auto` on one set at one point, beside each mode alone: milliseconds a token."""

    traces: str  # their name
    label: str
    point: Point
    fixed_ms: dict[ExecutionMode, float]
    first_ms: float  # of texts that are the first of a process
    later_ms: float  # of the third to the tenth

    def ratio(self, is_later: bool) -> float:
        """Returns auto's TPOT : the best of the fixed modes."""
        return self._auto_ms(is_later) / min(self.fixed_ms.values())

    def cloud_ratio(self, is_later: bool) -> float:
        """Returns auto's TPOT : cloud-only's."""
        return self._auto_ms(is_later) / self.fixed_ms[ExecutionMode.CLOUD_ONLY]

    def _auto_ms(self, is_later: bool) -> float:
        return self.later_ms if is_later else self.first_ms

    @property
    def place(self) -> str:
        """Returns the set and the point in words."""
        return f"{self.traces} {self.point}"

    def __str__(self) -> str:
        times = ", ".join(f"{mode} {ms:.1f}" for mode, ms in self.fixed_ms.items())
        return (
            f"{times}, auto {self.first_ms:.1f} ms a token, {self.ratio(False):.3f} of the best; later texts "
            f"{self.later_ms:.1f} ms, {self.ratio(True):.3f}"
        )


def run_auto(case: tuple[TraceSet, Point]) -> AutoRun:
    """Returns one set at one point, in each mode and in `auto`."""
    traces, point = case
    fixed = {mode: run_mode(traces, point, mode).tpot_ms for mode in CHOOSABLE_MODES}
    first = run_mode(traces, point, ExecutionMode.AUTO)
    later = run_later(traces, point)
    return AutoRun(traces.name, traces.label, point, fixed, first.tpot_ms, later.tpot_ms)


def run_later(traces: TraceSet, point: Point) -> Total:
    """Returns the total of every text once, after two others or more of its process."""
    chunks = [traces.texts[i : i + NUM_COUNTED] for i in range(0, len(traces.texts), NUM_COUNTED)]
    orders = [(*texts, *texts[:NUM_BEFORE]) for texts in chunks]
    played = play_texts(orders, point, ExecutionMode.AUTO)
    return total_of([text for texts in played for text in texts[NUM_BEFORE:]])


def measure_auto(sets: Sequence[TraceSet]) -> tuple[list[Measure], dict[str, Any]]:
    """Measures `ctl.auto` at every point, on each set; against the best fixed mode and against not
    speculating."""
    runs = _run_all(list(itertools.product(sets, MODE_POINTS)))
    above = [run.place for run in runs if max(run.ratio(False), run.ratio(True)) > TARGET]
    return _measures(runs), {"auto": {run.place: str(run) for run in runs}, "auto_above": above}


def _run_all(cases: Sequence[tuple[TraceSet, Point]]) -> list[AutoRun]:
    with fresh_processes() as pool:
        runs = list(pool.map(run_auto, cases))
    for name in dict.fromkeys(run.traces for run in runs):
        for is_later in (False, True):
            own = [run.ratio(is_later) for run in runs if run.traces == name]
            to_cloud = max(run.cloud_ratio(is_later) for run in runs if run.traces == name)
            found = f"mean {statistics.fmean(own):.3f}, worst {max(own):.3f} of the best"
            print(f"auto, {name}, {_TEXTS[is_later]}: {found}, {to_cloud:.3f} of cloud-only")
    return runs


def _measures(runs: Sequence[AutoRun]) -> list[Measure]:
    measures = []
    for label, is_later in itertools.product(dict.fromkeys(run.label for run in runs), (False, True)):
        own = [run for run in runs if run.label == label]
        name = "ctl.auto" + "_later" * is_later + ("" if label == "recorded" else f"_{label}")
        measures += _measures_of(name, f"{label}, {_TEXTS[is_later]}", own, is_later)
    return measures


def _measures_of(name: str, what: str, runs: Sequence[AutoRun], is_later: bool) -> list[Measure]:
    ratios = [run.ratio(is_later) for run in runs]
    worst = max(runs, key=lambda run: run.ratio(is_later))
    num_above = sum(ratio > TARGET for ratio in ratios)
    text = (
        f"TPOT of auto : best fixed way, {what}, worst, at {worst.place} "
        f"(mean {statistics.fmean(ratios):.3f}, {num_above} of {len(runs)} points above {TARGET})"
    )
    to_cloud = max(run.cloud_ratio(is_later) for run in runs)
    return [
        judged(name, text, worst.ratio(is_later), "ratio", at_most(TARGET)),
        judged(f"{name}_cloud", f"the same : cloud-only, {what}, worst", to_cloud, "ratio", at_most(TARGET)),
    ]
