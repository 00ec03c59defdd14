"""The execution modes in virtual time: each alone, and pipelined rounds against synchronous ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.controller.simulated import PlayedText, Point, play_texts
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import TraceSet, synthetic_traces
from outrider.experiments.shared.results import Measure, at_most, judged

PIPELINED_RTTS_MS = (60, 200)
FORWARD_MS = 30.0
SLOW_DRAFT_MS = 12.0
EMBEDDED_DRAFT_MS = 0.25  # a sampled token of the embedded draft, `make bench-main`
ALPHA = 0.8
NUM_POSITIONS = 8000  # of the synthetic text: luck is a per cent of it


@dataclass(frozen=True, slots=True)
class Total:
    """Sums up all texts of a set in one mode."""

    tpot_ms: float
    num_wasted_tokens: int
    num_tokens: int


def run_mode(traces: TraceSet, point: Point, mode: ExecutionMode) -> Total:
    """Returns the total of texts that are each the first of a process."""
    return total_of([played for (played,) in play_texts([[each] for each in traces.texts], point, mode)])


def total_of(texts: Sequence[PlayedText]) -> Total:
    """Returns the total of played texts."""
    num_tokens = sum(text.num_tokens for text in texts)
    return Total(
        tpot_ms=1e3 * math.fsum(text.seconds for text in texts) / num_tokens,
        num_wasted_tokens=sum(text.stats.num_wasted_draft_tokens for text in texts),
        num_tokens=num_tokens,
    )


def pipelined_measures() -> tuple[list[Measure], dict[str, str]]:
    """Returns `ctl.pipelined` and `ctl.pipelined_fast_draft`: pipelined : synchronous, both with `optimal`."""
    traces = synthetic_traces(ALPHA, "none", num_texts=1, num_positions=NUM_POSITIONS)
    measures, details = [], {}
    for suffix, draft_ms, target in (("", SLOW_DRAFT_MS, 0.85), ("_fast_draft", EMBEDDED_DRAFT_MS, 1.0)):
        ratios = {}
        for rtt_ms in PIPELINED_RTTS_MS:
            point = Point(rtt_ms, FORWARD_MS, draft_ms)
            alone = run_mode(traces, point, ExecutionMode.SPECULATIVE)
            ahead = run_mode(traces, point, ExecutionMode.PIPELINED)
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
