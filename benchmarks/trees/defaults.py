"""The default `--tree auto` beside `--tree off`, all other settings at their defaults: whether it is ever slower where
trees bring little, over loopback and short links, alone and beside others; what it gains where a forward is slow."""

from __future__ import annotations

from typing import Any

from benchmarks.results_file import Found
from benchmarks.trees.links import CLOUD_ONLY, FORWARD_MS, Settings, play, told
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_least, judged
from outrider.models import EMBEDDED

RTTS_MS = (0.0, 2.0, 10.0)
NUM_SESSIONS = (1, 8)
SLOW_RTTS_MS = (10.0, 30.0, 60.0)  # with the slow forward
NUM_NEW, NUM_PROMPTS = 256, 6
DEFAULTS: dict[str, Settings] = {
    "off": {"tree": "off"},
    "auto": {"tree": "auto"},
    "off again": {"tree": "off"},
}


def run() -> Found:
    """Returns the measures."""
    details: dict[str, Any] = {}
    near: dict[str, float] = {}
    for rtt_ms in RTTS_MS:
        for num_sessions in NUM_SESSIONS:
            name = f"RTT {rtt_ms:g}, {num_sessions} sessions"
            near[name], details[name] = _compare(rtt_ms, 0.0, num_sessions)
    slow: dict[str, float] = {}
    for rtt_ms in SLOW_RTTS_MS:
        name = f"RTT {rtt_ms:g}, forward {FORWARD_MS:g}"
        slow[name], details[name] = _compare(rtt_ms, FORWARD_MS, 1)
    what = f"tokens/s, --tree auto : off, defaults otherwise, worst of {_every(near)}"
    gain = f"the same with a slow forward, worst of {_every(slow)}"
    return [
        judged("tree.never_slower", what, min(near.values()), "ratio", at_least(0.97)),
        Measure("tree.default_gain", gain, min(slow.values()), "ratio"),
    ], details


def _compare(rtt_ms: float, forward_ms: float, num_sessions: int) -> tuple[float, dict[str, Any]]:
    """Returns tokens a second, auto : off, and what was found."""
    prompts = load_prompts(EMBEDDED / "prompts.jsonl")[:NUM_PROMPTS]
    cases = {**CLOUD_ONLY, **DEFAULTS}
    turns = play(prompts, rtt_ms, forward_ms, cases, num_sessions=num_sessions, num_new=NUM_NEW)
    found, a_a = (1 / turns.ratio(each, "off") for each in ("auto", "off again"))
    return found, told(turns) | {"ratio": found, "a_a": a_a, "num_drafted": turns.num_nodes["auto"]}


def _every(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items())
