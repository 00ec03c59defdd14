"""Systems to play in tests, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.figures.outcome import SystemFigures, figures_of
from outrider.experiments.simulator.parts.edges import RequestLog
from outrider.experiments.simulator.run import play

VERIFIER = {"step_ms": 20.0, "token_ms": 0.5}
DRAFT = {"token_ms": 2.0}


@dataclass
class Seen:
    outcome: SystemFigures
    logs: list[RequestLog]

    @property
    def gaps_s(self) -> list[float]:
        """Between the commits of the first request."""
        times = [at_s for at_s, _ in self.logs[0].commits]
        return [after - before for before, after in pairwise(times)]


def edges(**settings: Any) -> dict[str, Any]:
    """One group, synchronous rounds of four; nothing takes time but models and link."""
    rounds = {"mode": "speculative", "pipeline": "off", "depth_policy": "fixed"}
    settings["edge"] = rounds | settings.get("edge", {})
    return {"draft": DRAFT, "acceptance": 0.8, "link": {"rtt_ms": 50}, "output_tokens": 40, **settings}


def system(
    *groups: dict[str, Any], verifier: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    verifiers = [{"times": VERIFIER, **(verifier or {})}]
    return {"times": "none", "seconds": 600.0, "edges": list(groups), "verifiers": verifiers, **settings}


def seen(description: dict[str, Any]) -> Seen:
    logs: list[RequestLog] = []
    played = play(load_system(description), on_request=logs.append)
    return Seen(figures_of(played), logs)
