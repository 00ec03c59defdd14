"""Sessions that share one verifier in virtual time: what all of them get by the defaults, against all in one mode.

Every edge has one text after another, each draft length and mode by what it measures itself: `ctl.shared`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.pool import fresh_processes
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.run import play

NUM_SESSIONS = (4, 8, 16, 32)
SECONDS, WARMUP_S = 6.0, 2.0
TARGET = 1.05
# A step takes `step_ms`, and for each of its sessions and tokens as much more. Where tokens are slow rounds cost more,
# where answers are streams do.
VERIFIERS: dict[str, dict[str, float]] = {
    "slow tokens": {"step_ms": 1.2, "session_ms": 0.03, "token_ms": 0.14, "answer_ms": 0.03},
    "slow answers": {"step_ms": 1.2, "session_ms": 0.03, "token_ms": 0.085, "answer_ms": 0.08},
}
MODES: dict[str, dict[str, str]] = {
    "cloud-only": {"mode": "cloud-only"},
    "rounds": {"mode": "speculative", "pipeline": "off"},
    "pipelined": {"mode": "speculative", "pipeline": "on"},
    "defaults": {"mode": "auto"},
}
EDGE_MS = {"commit_ms": 0.05, "send_ms": 0.2, "receive_ms": 0.2}
WAY_MS = {"receive_ms": 0.3, "send_ms": 0.3}  # at the verifier
DRAFT_MS = 0.6


@dataclass(frozen=True, slots=True)
class Shared:
    """Holds one verifier under so many sessions: tokens a second of all of them, by mode."""

    verifier: str
    num_sessions: int
    rates: dict[str, float]

    @property
    def ratio(self) -> float:
        """Returns the tokens a second of the best single mode : those by the defaults."""
        return max(rate for mode, rate in self.rates.items() if mode != "defaults") / self.rates["defaults"]

    @property
    def place(self) -> str:
        """Returns which it is, in words."""
        return f"{self.verifier}, {self.num_sessions} sessions"


def measure_shared() -> tuple[list[Measure], dict[str, Any]]:
    """Returns `ctl.shared` and its table."""
    places = list(itertools.product(VERIFIERS, NUM_SESSIONS))
    cases = list(itertools.product(places, MODES))
    with fresh_processes() as pool:
        rates = dict(zip(cases, pool.map(_rate, cases), strict=True))
    runs = [Shared(*place, {mode: rates[place, mode] for mode in MODES}) for place in places]
    worst, mean = max(runs, key=lambda run: run.ratio), statistics.fmean(run.ratio for run in runs)
    text = (
        f"tokens/s of all in the best mode : by the defaults, {NUM_SESSIONS[0]} to {NUM_SESSIONS[-1]} sessions of one "
        f"verifier in virtual time, worst: {worst.place} (mean {mean:.3f})"
    )
    rows = [[run.place, *(f"{run.rates[mode]:,.0f}" for mode in MODES), f"{run.ratio:.3f}"] for run in runs]
    title = "Tokens a second of all sessions of one verifier, in virtual time"
    table = {"title": title, "columns": ["tokens/s", *MODES, "best : defaults"], "rows": rows}
    return [judged("ctl.shared", text, worst.ratio, "ratio", at_most(TARGET))], {"tables": [table]}


def _rate(case: tuple[tuple[str, int], str]) -> float:
    (verifier, num_sessions), mode = case
    played = play(load_system(_system(VERIFIERS[verifier], num_sessions, MODES[mode])))
    return played.tallies[0].counts["tokens"] / (played.seconds - WARMUP_S)


def _system(times: dict[str, float], num_sessions: int, edge: dict[str, str]) -> dict[str, Any]:
    edges: Sequence[dict[str, Any]] = [
        {
            "name": "e",
            "count": num_sessions,
            "link": "loopback",
            "draft": {"token_ms": DRAFT_MS},
            "edge": edge,
            "acceptance": "embedded T=0.8",
            "prompt_tokens": 16,
            "output_tokens": 96,
            "think_s": 0,
            "times": EDGE_MS,
        }
    ]
    verifiers = [{"serve": {}, "times": {**times, **WAY_MS}}]
    return {
        "name": "one verifier",
        "seconds": SECONDS,
        "warmup_s": WARMUP_S,
        "times": "none",
        "verifiers": verifiers,
        "edges": edges,
    }
