"""Pipelined rounds and the choice of the mode, in virtual time: what `bench_controller` says of both."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from common.costmodel import LinkCosts, ModelCosts
from edge_client.depth.optimal import OptimalDepth
from edge_client.mode_choice import ModeChoice, Way
from edge_client.pipeline import RoundWindow
from experiments.acceptance_traces import TextTrace, TraceSet, synthetic_traces
from experiments.controller_grid import Point
from experiments.results import Measure, at_most, judged
from experiments.virtual_pipeline import VirtualText

PIPELINED_RTTS_MS = (60, 200)
FORWARD_MS = 30.0
SLOW_DRAFT_MS = 12.0
EMBEDDED_DRAFT_MS = 0.25  # a sampled token of the embedded draft, `make bench-main`
ALPHA = 0.8
NUM_POSITIONS = 8000  # of the synthetic text: luck is a per cent of it
AUTO_TARGET = 1.05
FIXED_WAYS = tuple((way,) for way in Way)


@dataclass(frozen=True, slots=True)
class Total:
    """Of all texts of a set, by one way or several."""

    tpot_ms: float
    num_stale_rounds: int
    num_wasted_tokens: int
    num_tokens: int
    num_changes: int


def run_ways(traces: TraceSet, models: ModelCosts, link: LinkCosts, ways: Sequence[Way]) -> Total:
    """Every text is a session of its own, with the depth policy `optimal`."""
    texts = [
        VirtualText(each, models, lambda _: link, OptimalDepth(), _make_window(ways, each)).run()
        for each in traces.texts
    ]
    num_tokens = sum(len(text.token_times_s) for text in texts)
    choices = [text.window.choice for text in texts]
    return Total(
        tpot_ms=1e3 * math.fsum(text.token_times_s[-1] for text in texts) / num_tokens,
        num_stale_rounds=sum(text.num_stale_rounds for text in texts),
        num_wasted_tokens=sum(text.num_wasted_tokens for text in texts),
        num_tokens=num_tokens,
        num_changes=sum(choice.num_changes for choice in choices if choice is not None),
    )


def _make_window(ways: Sequence[Way], text: TextTrace) -> RoundWindow:
    """Guesses are made, as by default, where the trace says what comes of them."""
    may_guess = Way.PIPELINED in ways and text.gaps is not None
    return RoundWindow(None, ModeChoice(ways, may_guess=may_guess), may_guess)


def pipelined_measures() -> tuple[list[Measure], dict[str, str]]:
    """`ctl.pipelined` and `ctl.pipelined_fast_draft`: pipelined : synchronous, both with `optimal`."""
    traces = synthetic_traces(ALPHA, "none", num_texts=1, num_positions=NUM_POSITIONS)
    measures, details = [], {}
    forward_s = FORWARD_MS / 1e3
    for suffix, draft_ms, target in (("", SLOW_DRAFT_MS, 0.85), ("_fast_draft", EMBEDDED_DRAFT_MS, 1.0)):
        ratios = {}
        for rtt_ms in PIPELINED_RTTS_MS:
            models = ModelCosts(draft_ms / 1e3, forward_s, forward_s, 0.015 * forward_s)
            link = LinkCosts(rtt_s=rtt_ms / 1e3)
            alone = run_ways(traces, models, link, (Way.SYNCHRONOUS,))
            ahead = run_ways(traces, models, link, (Way.PIPELINED,))
            ratios[rtt_ms] = ahead.tpot_ms / alone.tpot_ms
            wasted = ahead.num_wasted_tokens / ahead.num_tokens
            details[f"RTT {rtt_ms} draft {draft_ms:g} ms"] = (
                f"synchronous {alone.tpot_ms:.1f}, pipelined {ahead.tpot_ms:.1f} ms a token, "
                f"{wasted:.2f} drafted tokens wasted for one of the text"
            )
        worst = max(ratios, key=ratios.__getitem__)
        text = (
            f"TPOT pipelined : optimal synchronous, synthetic {ALPHA:g}, forward {FORWARD_MS:g} ms, draft "
            f"{draft_ms:g} ms, RTT "
            + ", ".join(f"{rtt_ms} ms {ratio:.3f}" for rtt_ms, ratio in ratios.items())
        )
        measures.append(judged(f"ctl.pipelined{suffix}", text, ratios[worst], "ratio", at_most(target)))
    return measures, details


@dataclass(frozen=True, slots=True)
class AutoRun:
    """`auto` on one set at one point, beside each way alone: milliseconds a token."""

    traces: str  # their name
    point: Point
    auto_ms: float
    num_changes: int
    fixed_ms: dict[Way, float]

    @property
    def ratio(self) -> float:
        """To the best of the fixed ways."""
        return self.auto_ms / min(self.fixed_ms.values())

    @property
    def cloud_ratio(self) -> float:
        return self.auto_ms / self.fixed_ms[Way.CLOUD_ONLY]

    def __str__(self) -> str:
        times = ", ".join(f"{way} {ms:.1f}" for way, ms in self.fixed_ms.items())
        changes = f"{self.num_changes} changes"
        return f"{times}, auto {self.auto_ms:.1f} ms a token ({changes}), {self.ratio:.3f} of the best"


def run_auto(case: tuple[TraceSet, Point]) -> AutoRun:
    traces, point = case
    fixed = {ways[0]: run_ways(traces, point.models, point.link, ways).tpot_ms for ways in FIXED_WAYS}
    auto = run_ways(traces, point.models, point.link, tuple(Way))
    return AutoRun(traces.name, point, auto.tpot_ms, auto.num_changes, fixed)


def measure_auto(
    sets: Sequence[TraceSet], points: Sequence[Point]
) -> tuple[list[Measure], dict[str, str]]:
    """`ctl.auto`: over the points, on each set; against the best fixed way and against not speculating."""
    labels = {traces.name: traces.label for traces in sets}
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(run_auto, itertools.product(sets, points)))
    for name in labels:
        own = [run for run in runs if run.traces == name]
        mean, worst = statistics.fmean(run.ratio for run in own), max(run.ratio for run in own)
        to_cloud = max(run.cloud_ratio for run in own)
        print(f"auto, {name}: mean {mean:.3f}, worst {worst:.3f} of the best, {to_cloud:.3f} of cloud-only")
    measures = []
    for label in dict.fromkeys(labels.values()):
        measures += _auto_measures(label, [run for run in runs if labels[run.traces] == label])
    return measures, {f"{run.traces} {run.point}": str(run) for run in runs}


def _auto_measures(label: str, runs: Sequence[AutoRun]) -> list[Measure]:
    worst = max(runs, key=lambda run: run.ratio)
    mean = statistics.fmean(run.ratio for run in runs)
    num_above = sum(run.ratio > AUTO_TARGET for run in runs)
    suffix = "" if label == "recorded" else f"_{label}"
    text = (
        f"TPOT of auto : best fixed way, {label}, worst, at {worst.traces} {worst.point} "
        f"(mean {mean:.3f}, {num_above} of {len(runs)} points above {AUTO_TARGET})"
    )
    to_cloud = max(run.cloud_ratio for run in runs)
    return [
        judged(f"ctl.auto{suffix}", text, worst.ratio, "ratio", at_most(AUTO_TARGET)),
        judged(
            f"ctl.auto{suffix}_cloud",
            f"the same : cloud-only, {label}, worst",
            to_cloud,
            "ratio",
            at_most(AUTO_TARGET),
        ),
    ]
