"""Pipelined rounds with guesses at what follows a rejection against those without, in virtual time.

    python -m benchmarks.controller.guesses

Acceptance, gaps and runner-ups are recorded (`benchmarks.controller.record_acceptance`). Both sides take the
depth policy `optimal`; with guesses the draft's reading of tokens again after a change of branch is charged.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.controller.grid import Point
from benchmarks.controller.simulated import play_texts
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.shared.acceptance_traces import TraceSet, load_traces
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.results import Measure, at_most, judged

RTTS_MS = (20, 60, 200)
FORWARDS_MS = (5, 30)
DRAFTS_MS = (0.25, 2, 12)
JUDGED = [(rtt_ms, 30, 0.25) for rtt_ms in (60, 200)]  # the embedded draft's own speed


@dataclass(frozen=True, slots=True)
class Total:
    """Sums up all texts of a set; the counts are for one token of the text."""

    tpot_ms: float
    rounds_sent: float
    guesses_sent: float
    guesses_hit: float
    tokens_wasted: float


def run_texts(traces: TraceSet, point: Point, has_branches: bool) -> Total:
    """Returns the total of the set, pipelined."""
    orders = [[each] for each in traces.texts]
    played = play_texts(orders, point, ExecutionMode.PIPELINED, has_branches=has_branches)
    texts = [text for (text,) in played]
    num_tokens = sum(text.num_tokens for text in texts)
    return Total(
        1e3 * math.fsum(text.seconds for text in texts) / num_tokens,
        sum(len(text.stats.rounds) for text in texts) / num_tokens,
        sum(text.stats.num_guessed_rounds for text in texts) / num_tokens,
        sum(text.stats.num_guess_hits for text in texts) / num_tokens,
        sum(text.stats.num_wasted_draft_tokens for text in texts) / num_tokens,
    )


def guess_measures(sets: Sequence[TraceSet]) -> tuple[list[Measure], dict[str, str]]:
    """Measures `ctl.guesses` where the draft is fast, and the worst of the whole grid."""
    ratios: dict[tuple[float, float, float], list[float]] = {}
    details = {}
    for traces in sets:
        if any(text.gaps is None for text in traces.texts):
            continue
        for rtt_ms, forward_ms, draft_ms in itertools.product(RTTS_MS, FORWARDS_MS, DRAFTS_MS):
            point = Point(rtt_ms, forward_ms, draft_ms)
            alone = run_texts(traces, point, has_branches=False)
            guessed = run_texts(traces, point, has_branches=True)
            ratio = guessed.tpot_ms / alone.tpot_ms
            ratios.setdefault((rtt_ms, forward_ms, draft_ms), []).append(ratio)
            details[f"{traces.name} RTT {rtt_ms} forward {forward_ms} draft {draft_ms:g} ms"] = (
                f"without {alone.tpot_ms:.1f}, with {guessed.tpot_ms:.1f} ms a token: {ratio:.3f}; for one "
                f"{alone.rounds_sent:.2f} and {guessed.rounds_sent:.2f} rounds sent, of these "
                f"{guessed.guesses_sent:.2f} guesses, {guessed.guesses_hit:.3f} true ones; "
                f"{alone.tokens_wasted:.1f} and {guessed.tokens_wasted:.1f} drafted tokens wasted"
            )
    fast = max(max(ratios[point]) for point in JUDGED)
    text = "TPOT with guesses : without, recorded, RTT 60 and 200, forward 30, draft 0.25 ms, worst"
    measures = [judged("ctl.guesses", text, fast, "ratio", at_most(0.97))]
    worst = max(ratios, key=lambda point: max(ratios[point]))
    mean = statistics.fmean(itertools.chain(*ratios.values()))
    where = "RTT {} forward {} draft {} ms".format(*worst)
    text = f"the same over RTT 20-200, forward 5-30, draft 0.25-12 ms, worst: {where} (mean {mean:.3f})"
    measures.append(judged("ctl.guesses_worst", text, max(ratios[worst]), "ratio", at_most(1.0)))
    return measures, details


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.guesses", description=__doc__)
    parser.parse_args(argv)
    measures, details = guess_measures(load_traces())
    for name, text in details.items():
        print(f"{name}: {text}")
    for measure in measures:
        print(f"{measure.id} {measure.value:.3f}: {measure.measure}")
    return 0


if __name__ == "__main__":
    run_command("bench_guesses", main)
