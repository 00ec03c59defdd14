"""Fresh prompts in real processes: tokens a second of trees with suffixes beside trees of the draft alone."""

from __future__ import annotations

from typing import Any

from benchmarks.results_file import Found
from benchmarks.trees.links import CLOUD_ONLY, FORWARD_MS, Settings, Turns, play, told
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_least, judged

NUM_PROMPTS, NUM_NEW = 12, 96
NODES = (16, 64)
LINKS = {"RTT 30 ms, forward 30 ms": (30.0, FORWARD_MS), "loopback": (0.0, 0.0)}


def run() -> Found:
    """Returns the measures."""
    details: dict[str, Any] = {}
    measures: list[Measure] = []
    for name, (rtt_ms, forward_ms) in LINKS.items():
        cases: dict[str, Settings] = dict(CLOUD_ONLY)
        for nodes in NODES:
            for strategy in ("model", "model+suffix", "model again"):
                cases[f"{strategy} {nodes}"] = _settings(strategy.removesuffix(" again"), nodes)
        turns = play(load_prompts()[:NUM_PROMPTS], rtt_ms, forward_ms, cases, num_new=NUM_NEW)
        details[name] = told(turns)
        id = "src.suffix_fresh" if rtt_ms else "src.suffix_fresh_loopback"
        measures.append(_measure(id, name, turns))
    return measures, details


def _settings(strategy: str, nodes: int) -> Settings:
    return {"draft_strategy": strategy, "tree": nodes, "mode": "speculative", "pipeline": "off"}


def _measure(id: str, name: str, turns: Turns) -> Measure:
    joined, alone, again = (
        turns.best([f"{strategy} {nodes}" for nodes in NODES])
        for strategy in ("model+suffix", "model", "model again")
    )
    a_a = 1 / turns.ratio(again, alone)
    what = f"fresh prompts, {name}: tokens/s, {joined} : {alone} (A/A {a_a:.2f})"
    return judged(id, what, 1 / turns.ratio(joined, alone), "ratio", at_least(1.0))
