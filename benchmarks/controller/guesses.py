"""Pipelined rounds with speculative branches against those without, in virtual time: `ctl.guesses`.

Acceptance and runner-ups are recorded. Both sides take the depth policy `optimal`; with branches the draft reads again
what it has left.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.controller.pool import fresh_processes
from benchmarks.controller.simulated import Point, play_texts
from benchmarks.controller.ways import EMBEDDED_DRAFT_MS, FORWARD_MS, Total, total_of
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import TraceSet
from outrider.experiments.shared.results import Measure, at_most, judged

RTTS_MS = (20, 60, 200)
FORWARDS_MS = (5, FORWARD_MS)
DRAFTS_MS = (EMBEDDED_DRAFT_MS, 2, 12)
JUDGED = [Point(rtt_ms, FORWARD_MS, EMBEDDED_DRAFT_MS) for rtt_ms in (60, 200)]


@dataclass(frozen=True, slots=True)
class Branching:
    """Holds one set at one point, with branches and without."""

    traces: str
    point: Point
    plain: Total
    branching: Total

    @property
    def ratio(self) -> float:
        """Returns TPOT with : without."""
        return self.branching.tpot_ms / self.plain.tpot_ms

    def __str__(self) -> str:
        return f"without {self.plain.tpot_ms:.1f}, with {self.branching.tpot_ms:.1f} ms a token, {self.ratio:.3f}"


def measure_guesses(sets: Sequence[TraceSet]) -> tuple[list[Measure], dict[str, str]]:
    """Returns `ctl.guesses`, where the draft is the embedded one, and the worst of the whole grid."""
    recorded = [each for each in sets if each.label == "recorded"]
    points = itertools.starmap(Point, itertools.product(RTTS_MS, FORWARDS_MS, DRAFTS_MS))
    with fresh_processes() as pool:
        runs = list(pool.map(_compare, itertools.product(recorded, points)))
    fast, worst = (
        max(each, key=lambda run: run.ratio) for each in ([r for r in runs if r.point in JUDGED], runs)
    )
    text = (
        f"TPOT with branches : without, recorded, RTT 60 and 200, forward {FORWARD_MS:g}, draft "
        f"{EMBEDDED_DRAFT_MS:g} ms, worst"
    )
    mean = statistics.fmean(run.ratio for run in runs)
    everywhere = (
        f"the same over RTT 20-200, forward 5-30, draft 0.25-12 ms, worst: {worst.point} (mean {mean:.3f})"
    )
    measures = [
        judged("ctl.guesses", text, fast.ratio, "ratio", at_most(0.97)),
        judged("ctl.guesses_worst", everywhere, worst.ratio, "ratio", at_most(1.0)),
    ]
    return measures, {f"{run.traces} {run.point}": str(run) for run in runs}


def _compare(case: tuple[TraceSet, Point]) -> Branching:
    traces, point = case
    totals = []
    for has_branches in (False, True):
        orders = [[each] for each in traces.texts]
        played = play_texts(orders, point, ExecutionMode.PIPELINED, has_branches=has_branches)
        totals.append(total_of([text for (text,) in played]))
    return Branching(traces.name, point, *totals)
