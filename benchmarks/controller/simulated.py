"""Texts of acceptance traces in virtual time: the simulator's edges and verifiers, one of each for every
text.

The edge is the product's own `EdgeSession` with its depth policy, window and choice of the mode, the verifier
the product's engine; drafting, round trips and forwards take what the cost model says. Before its texts each
edge asks for two tokens, so that the verifier has seen steps of two sizes, as one that served before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.grid import Point
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import SessionStats
from outrider.experiments.shared.acceptance_traces import TextTrace
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.parts.drafts import TracedText
from outrider.experiments.simulator.parts.edges import Ask, RequestLog
from outrider.experiments.simulator.run import play

NUM_PROMPT_TOKENS = 2  # so short that a draft has read it before the opening is answered
REREAD_SHARE = 0.12  # of a drafted token's time, each token that is read again after a change of branch
_SETTINGS: dict[ExecutionMode, dict[str, Any]] = {
    ExecutionMode.SPECULATIVE: {},
    ExecutionMode.PIPELINED: {"pipeline": "on"},
    ExecutionMode.CLOUD_ONLY: {"mode": "cloud-only"},
    ExecutionMode.AUTO: {"mode": "auto"},
}


@dataclass(frozen=True, slots=True)
class PlayedText:
    """Holds one text's time from the first token to the last, and what its session recorded."""

    seconds: float
    num_tokens: int  # without the first, which the opening brings
    stats: SessionStats


def play_texts(
    orders: Sequence[Sequence[TextTrace]],
    point: Point,
    mode: ExecutionMode,
    *,
    has_branches: bool = True,
    policy: str = "optimal",
) -> list[list[PlayedText]]:
    """Returns what each edge saw of its texts, one after the other, `orders[i]` being those of edge i.

    Later texts of an edge begin with what it learned of earlier ones. `has_branches`: speculative branches
    are sent where the traces have runner-ups.
    """
    traces = list({id(trace): trace for order in orders for trace in order}.values())
    places = {id(trace): place for place, trace in enumerate(traces)}
    found: list[list[PlayedText]] = [[] for _ in orders]

    def take(log: RequestLog) -> None:
        assert log.is_finished and log.result is not None, log.error
        if log.number:
            num_tokens = log.num_tokens - 1
            seconds = log.commits[-1][0] - log.commits[0][0]
            found[log.edge].append(PlayedText(seconds, num_tokens, log.result.stats))

    warm = Ask(NUM_PROMPT_TOKENS, 2, 0)
    asks = [
        [warm, *(Ask(NUM_PROMPT_TOKENS, trace.num_positions + 1, places[id(trace)]) for trace in order)]
        for order in orders
    ]
    num_tokens = max(sum(ask.num_output_tokens for ask in each) for each in asks)
    token_ms = point.rtt_ms + 2 * point.forward_ms + 64 * point.draft_ms
    system = load_system(_system(point, mode, policy, has_branches, len(orders), num_tokens * token_ms / 1e3))
    play(system, on_request=take, asks=asks, traces=[TracedText(trace, has_branches) for trace in traces])
    return found


def _system(
    point: Point, mode: ExecutionMode, policy: str, has_branches: bool, count: int, seconds: float
) -> dict[str, Any]:
    models = point.models
    step_ms = 1e3 * (models.verify_fixed_s - models.verify_token_s)
    edge = {"depth_policy": policy, "on_timeout": "wait", "guesses": "auto" if has_branches else "off"}
    return {
        "seconds": seconds,
        "times": "none",
        "edges": [
            {
                "count": count,
                "link": {"name": "ideal", "rtt_ms": point.rtt_ms},
                "edge": edge | _SETTINGS[mode],
                "draft": {
                    "token_ms": point.draft_ms,
                    "read_token_ms": REREAD_SHARE * point.draft_ms if has_branches else 0.0,
                },
            }
        ],
        "verifiers": [
            {
                "count": count,
                "balance": "edge",
                "times": {"step_ms": step_ms, "token_ms": 1e3 * models.verify_token_s},
            }
        ],
    }
