"""The ways to work, in virtual time: each alone, and pipelined rounds against synchronous ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.controller.virtual_pipeline import VirtualText
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.controller.depth.optimal import OptimalDepth
from outrider.edge_client.controller.mode_policy import ModeChoice, Way
from outrider.edge_client.controller.window import RoundWindow
from outrider.experiments.shared.acceptance_traces import TextTrace, TraceSet, synthetic_traces
from outrider.experiments.shared.results import Measure, at_most, judged

PIPELINED_RTTS_MS = (60, 200)
FORWARD_MS = 30.0
SLOW_DRAFT_MS = 12.0
EMBEDDED_DRAFT_MS = 0.25  # a sampled token of the embedded draft, `make bench-main`
ALPHA = 0.8
NUM_POSITIONS = 8000  # of the synthetic text: luck is a per cent of it


@dataclass(frozen=True, slots=True)
class Total:
    """Of all texts of a set, by one way or several."""

    tpot_ms: float
    num_stale_rounds: int
    num_wasted_tokens: int
    num_tokens: int
    num_changes: int


def run_ways(traces: TraceSet, models: ModelCosts, link: LinkCosts, ways: Sequence[Way]) -> Total:
    """Every text is a session of its own that knows nothing."""
    return total_of([run_text(each, models, link, ways) for each in traces.texts])


def run_text(
    trace: TextTrace,
    models: ModelCosts,
    link: LinkCosts,
    ways: Sequence[Way],
    belief: Sequence[float] | None = None,
) -> VirtualText:
    """With the depth policy `optimal`; `belief`: what the choice begins with."""
    window = _make_window(ways, trace)
    if belief is not None and window.choice is not None:
        window.choice.expect(belief)
    return VirtualText(trace, models, lambda _: link, OptimalDepth(), window).run()


def total_of(texts: Sequence[VirtualText]) -> Total:
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
