"""Tokens a round of every source with trees of 16 nodes, at temperatures 0 and .8."""

from __future__ import annotations

from typing import Any

from benchmarks.heads.embedded import load_prompt_ids, make_service
from benchmarks.heads.service import NUM_NODES, Case
from benchmarks.results_file import Found
from outrider.cloud_verifier.heads.early_exit import DEFAULT_CHAIN
from outrider.common.types import EARLY_EXIT, SamplingParams
from outrider.experiments.shared.results import Measure, at_least, judged

NUM_PROMPTS, NUM_NEW = 24, 96
TARGETS = {
    "medusa": 1.7,
    "eagle": 2.4,
    "lookahead": 1.2,
}  # of issue and papers, at temperature 0


def run() -> Found:
    """Returns the measures."""
    service, prompts = make_service(), load_prompt_ids(NUM_PROMPTS)
    details: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        for source in service.drafter.sources:
            texts = []
            for start in range(0, len(prompts), 8):
                cases = [
                    Case(prompt, SamplingParams(temperature=temperature, seed=start + seed), source)
                    for seed, prompt in enumerate(prompts[start : start + 8])
                ]
                texts += service.write(cases, NUM_NEW)
            num_tokens = sum(len(text.token_ids) - 1 for text in texts)
            num_rounds = sum(text.num_steps for text in texts)
            details[f"{source}, T={temperature:g}"] = round(num_tokens / num_rounds, 3)
    measures = []
    for source in service.drafter.sources:
        greedy, sampled = (details[f"{source}, T={each}"] for each in ("0", "0.8"))
        shape = f"chains of {DEFAULT_CHAIN}" if source == EARLY_EXIT else f"{NUM_NODES} nodes"
        what = f"tokens a round by {source}, {shape}, temperature 0 (at .8: {sampled})"
        if source in TARGETS:
            measures.append(judged(f"heads.{source}", what, greedy, "tokens", at_least(TARGETS[source])))
        else:
            measures.append(Measure(f"heads.{source}", what, greedy, "tokens"))
    if {"medusa", "hydra"} <= set(service.drafter.sources):
        ratio = details["hydra, T=0"] / details["medusa, T=0"]
        what = "tokens a round by Hydra's heads : Medusa's, temperature 0"
        measures.append(judged("heads.hydra_gain", what, ratio, "ratio", at_least(1.1)))
    return measures, details
