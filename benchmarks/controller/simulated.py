"""Texts of acceptance traces in virtual time: the simulator's edges and verifiers, one of each for every
text.

The edge is the product's own `EdgeSession` with its depth policy, window and choice of the mode, the verifier
the product's engine; drafting, round trips and forwards take what the cost model says. Before its texts each
edge asks for two tokens, so that the verifier has seen steps of two sizes, as one that served before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import SessionStats
from outrider.experiments.shared.acceptance_traces import TextTrace
from outrider.experiments.simulator.config import load_system
from outrider.experiments.simulator.parts.drafts import TracedText
from outrider.experiments.simulator.parts.edges import Ask, RequestLog
from outrider.experiments.simulator.run import play

RTTS_MS = (1, 5, 20, 60, 200, 600)
FORWARDS_MS = (5, 30, 70)
DRAFTS_MS = (0.2, 2, 12)
NUM_PROMPT_TOKENS = 2  # so short that a draft has read it before the opening is answered
REREAD_SHARE = 0.12  # of a drafted token's time, each token that is read again after a change of branch
VERIFY_TOKEN_SHARE = 0.015  # of a forward, each token more: what large targets on GPUs take or less


@dataclass(frozen=True, slots=True)
class Place:
    """Holds what edges and verifiers take, as the simulator's configuration names it, and the round trip."""

    rtt_ms: float
    verifier: Mapping[str, float]
    draft: Mapping[str, float]
    edge: Mapping[str, float] = field(default_factory=dict)  # beside drafting

    def system(self, edge: Mapping[str, Any], count: int, num_tokens: int) -> dict[str, Any]:
        """Returns the configuration of `count` edges with a verifier each, for texts of so many tokens."""
        parts_ms = (*self.verifier.values(), *self.draft.values(), *self.edge.values())
        token_ms = self.rtt_ms + 64 * sum(parts_ms)  # far more than any takes: it ends with the last text
        return {
            "seconds": num_tokens * token_ms / 1e3,
            "times": {"edge": dict(self.edge)} if self.edge else "none",
            "edges": [
                {
                    "count": count,
                    "link": {"name": "ideal", "rtt_ms": self.rtt_ms},
                    "edge": {"on_timeout": "wait", **edge},
                    "draft": dict(self.draft),
                }
            ],
            "verifiers": [{"count": count, "balance": "edge", "times": dict(self.verifier)}],
        }


@dataclass(frozen=True, slots=True)
class Point:
    """Holds a point of models and link."""

    rtt_ms: float
    forward_ms: float
    draft_ms: float

    @property
    def models(self) -> ModelCosts:
        """Returns the models' costs."""
        forward_s = self.forward_ms / 1e3
        return ModelCosts(self.draft_ms / 1e3, forward_s, forward_s, VERIFY_TOKEN_SHARE * forward_s)

    @property
    def link(self) -> LinkCosts:
        """Returns the link's costs."""
        return LinkCosts(rtt_s=self.rtt_ms / 1e3)

    def place(self, has_branches: bool) -> Place:
        """Returns it as the simulator names it. Where branches are drafted, tokens are read again."""
        models = self.models
        verifier = {
            "step_ms": 1e3 * (models.verify_fixed_s - models.verify_token_s),
            "token_ms": 1e3 * models.verify_token_s,
        }
        draft = {
            "token_ms": self.draft_ms,
            "read_token_ms": REREAD_SHARE * self.draft_ms if has_branches else 0.0,
        }
        return Place(self.rtt_ms, verifier, draft)

    def __str__(self) -> str:
        return f"RTT {self.rtt_ms:g} forward {self.forward_ms:g} draft {self.draft_ms:g} ms"


POINTS = [Point(*parts) for parts in itertools.product(RTTS_MS, FORWARDS_MS, DRAFTS_MS)]
# Of them where the modes are compared, which takes four sessions a text: the ends of the forwards are enough.
MODE_POINTS = [point for point in POINTS if point.rtt_ms != 5 and point.forward_ms != 30]

# Acceptances that real pairs have seldom, and what the draft knows of its tokens.
SYNTHETIC = ((0.3, "none"), (0.8, "none"), (0.95, "none"), (0.8, "certain"), (0.8, "knows"))


_SETTINGS: dict[ExecutionMode, dict[str, Any]] = {
    ExecutionMode.SPECULATIVE: {"mode": "speculative", "pipeline": "off"},
    ExecutionMode.PIPELINED: {"mode": "speculative", "pipeline": "on"},
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
    edge = _SETTINGS[mode] | {
        "tree": "off",
        "depth_policy": policy,
        "guesses": "auto" if has_branches else "off",
    }
    return play_edges(orders, point.place(has_branches), edge, has_branches=has_branches)


def play_edges(
    orders: Sequence[Sequence[TextTrace]],
    place: Place,
    edge: Mapping[str, Any],
    *,
    has_branches: bool = True,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    num_tokens: int | None = None,
) -> list[list[PlayedText]]:
    """Returns the same where each edge runs with the options of `edge`. Each text has as many tokens as its
    trace, or `num_tokens`, the first included."""
    traces = list({id(trace): trace for order in orders for trace in order}.values())
    places = {id(trace): number for number, trace in enumerate(traces)}
    found: list[list[PlayedText]] = [[] for _ in orders]

    def take(log: RequestLog) -> None:
        assert log.is_finished and log.result is not None, log.error
        if log.number:
            num_tokens = log.num_tokens - 1
            seconds = log.commits[-1][0] - log.commits[0][0]
            found[log.edge].append(PlayedText(seconds, num_tokens, log.result.stats))

    warm = Ask(num_prompt_tokens, 2, 0)
    asks = [
        [
            warm,
            *(
                Ask(num_prompt_tokens, num_tokens or each.num_positions + 1, places[id(each)])
                for each in order
            ),
        ]
        for order in orders
    ]
    most_tokens = max(sum(ask.num_output_tokens for ask in each) for each in asks)
    system = load_system(place.system(edge, len(orders), most_tokens))
    play(system, on_request=take, asks=asks, traces=[TracedText(trace, has_branches) for trace in traces])
    return found
