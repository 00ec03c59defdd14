"""The default `--tree auto` beside `--tree off` in virtual time, by recorded drafts of several targets: with the times
of a target on a CPU, whose rows are dear, and with a forward of 30 ms whose rows are cheap."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.results_file import Found
from outrider.experiments.shared.results import Measure
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import figures_of
from outrider.experiments.simulator.run import play

DRAFTS = (
    "embedded T=0.8",
    "embedded/trained T=1",
    "embedded/short T=0.7",
    "prose/trained T=0.7",
    "prose/first-layers T=1",
    "tables/trained T=0",
    "tables/first-layers T=0.7",
)
RTTS_MS = (2, 10, 30, 60, 120)
NUM_TEXTS, NUM_NEW = 8, 128
# Changes of the verifier's times.
TARGETS: dict[str, dict[str, Any]] = {
    "own times": {},
    "forward 30": {"times": {"step_ms": 30.0, "token_ms": 0.05, "node_ms": 0.05}},
}


def run() -> Found:
    """Returns the measures."""
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    for target, changes in TARGETS.items():
        ratios = {
            f"RTT {rtt_ms}": [
                _token_ms(draft, rtt_ms, changes, "auto") / _token_ms(draft, rtt_ms, changes, "off")
                for draft in DRAFTS
            ]
            for rtt_ms in RTTS_MS
        }
        details[target] = {name: dict(zip(DRAFTS, found, strict=True)) for name, found in ratios.items()}
        means = {name: statistics.geometric_mean(found) for name, found in ratios.items()}
        worst = max(max(found) for found in ratios.values())
        every = ", ".join(f"{name}: {mean:.3f}" for name, mean in means.items())
        what = f"time a token, --tree auto : off, virtual time, {target}, {len(DRAFTS)} drafts; means {every}; worst"
        measures.append(Measure(f"tree.virtual_{target.replace(' ', '_')}", what, worst, "ratio"))
    return measures, details


def _token_ms(draft: str, rtt_ms: float, changes: dict[str, Any], tree: str) -> float:
    edge = {
        "acceptance": draft,
        "link": {"rtt_ms": rtt_ms},
        "prompt_tokens": 20,
        "output_tokens": NUM_NEW,
        "requests": NUM_TEXTS,
        "edge": {"mode": "auto", "tree": tree},
    }
    system = load_system({"seconds": 6000.0, "edges": [edge], "verifiers": [changes]})
    mean = figures_of(play(system)).total.tpot_ms.mean
    assert mean is not None, "texts have tokens"
    return mean
