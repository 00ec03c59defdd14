"""`heads.colocated`: tokens a second of every source for one session, in turns, in this process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.heads.embedded import load_prompt_ids, make_service
from benchmarks.heads.service import CLOUD_ONLY, Case
from benchmarks.results_file import Found
from outrider.common.types import EARLY_EXIT, SamplingParams
from outrider.experiments.shared.results import Measure

NUM_PROMPTS, NUM_NEW = 8, 96
CHAIN = 4


def run() -> Found:
    """Returns the measure: the best head against the best of cloud-only, the draft's chains and its trees."""
    service, prompts = make_service(), load_prompt_ids(NUM_PROMPTS)
    ways: dict[str, dict[str, Any]] = {
        CLOUD_ONLY: {"source": CLOUD_ONLY},
        f"draft, chain of {CHAIN}": {"source": "draft", "num_nodes": CHAIN, "is_tree": False},
        "draft, tree": {"source": "draft"},
        f"{CLOUD_ONLY} again": {"source": CLOUD_ONLY},
    }
    heads = [source for source in service.drafter.sources if source != "draft"]
    ways |= {
        f"{source}, tree of {size}": {"source": source, "num_nodes": size}
        for source in heads
        if source != EARLY_EXIT
        for size in (4, 16)
    }
    ways |= {
        f"{EARLY_EXIT}, chain of {size}": {"source": EARLY_EXIT, "num_nodes": size, "is_tree": False}
        for size in (2, CHAIN)
    }
    seconds: dict[str, float] = defaultdict(float)
    for turn, prompt in enumerate(prompts):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            service.write([Case(prompt, SamplingParams(seed=turn), **ways[name])], NUM_NEW)
            seconds[name] += service.seconds
    rates = {name: round(NUM_PROMPTS * (NUM_NEW - 1) / each, 2) for name, each in seconds.items()}
    ours = {name: rate for name, rate in rates.items() if name.partition(",")[0] in heads}
    rivals = {name: rate for name, rate in rates.items() if name not in ours}
    best, rival = max(ours, key=ours.__getitem__), max(rivals, key=rivals.__getitem__)
    what = f"co-located tokens/s at temperature 1, one session: {best} ({ours[best]}) : {rival} ({rivals[rival]})"
    return [Measure("heads.colocated", what, round(ours[best] / rivals[rival], 3), "ratio")], {"rates": rates}
