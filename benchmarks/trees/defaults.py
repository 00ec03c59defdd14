"""Whether `--tree auto` is ever slower than `--tree off` where trees bring little: over loopback and short links, alone
and beside others, all other settings at their defaults."""

from __future__ import annotations

from typing import Any

from benchmarks.results_file import Found
from benchmarks.trees.links import CLOUD_ONLY, Settings, play, told
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED

RTTS_MS = (0.0, 2.0, 10.0)
NUM_SESSIONS = (1, 8)
NUM_NEW, NUM_PROMPTS = 256, 6
DEFAULTS: dict[str, Settings] = {
    "off": {"tree": "off"},
    "auto": {"tree": "auto"},
    "off again": {"tree": "off"},
}


def run() -> Found:
    """Returns the measure."""
    prompts = load_prompts(EMBEDDED / "prompts.jsonl")[:NUM_PROMPTS]
    details: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for rtt_ms in RTTS_MS:
        for num_sessions in NUM_SESSIONS:
            cases = {**CLOUD_ONLY, **DEFAULTS}
            turns = play(prompts, rtt_ms, 0.0, cases, num_sessions=num_sessions, num_new=NUM_NEW)
            name = f"RTT {rtt_ms:g}, {num_sessions} sessions"
            ratios[name] = 1 / turns.ratio("auto", "off")
            details[name] = told(turns) | {"ratio": ratios[name], "a_a": 1 / turns.ratio("off again", "off")}
    worst = min(ratios, key=ratios.__getitem__)
    every = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items())
    what = f"tokens/s, --tree auto : off, defaults otherwise, worst of {every}"
    return [judged("tree.never_slower", what, ratios[worst], "ratio", at_least(0.97))], details
