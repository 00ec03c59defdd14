"""The defaults on the bank of pairs (`make pair-bank`), in virtual time: against the best fixed setting,
against cloud-only, and `optimal` against the best fixed length.

A case is a pair at one temperature, a text's length, a link, and times as recorded or stretched. Each of the
recorded texts is played alone, as the first of its process or after two others. The fixed setting that is best
over the same texts is chosen afterwards, so a ratio above 1 is partly that setting's luck.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from benchmarks.controller.simulated import Place, play_edges
from benchmarks.controller.ways import Total, total_of
from outrider.edge_client.drafting.registry import PROMPT_LOOKUP
from outrider.experiments.shared.acceptance_traces import TRACES, PairTimes, TextTrace, TraceSet, load_traces

TARGETS = ("embedded", "prose", "tables")
NUM_TOKENS = (32, 100, 400)
RTTS_MS = (0.3, 5, 20, 60, 200)
NUM_BEFORE = 2  # texts of a process before a later one
NUM_PROMPT_TOKENS = 40
SEND_MS, COMMIT_MS = 0.25, 0.05  # of a message at each of its ends; of a token shown
TOKEN_SHARE = 0.015  # of a stretched forward, each token more

# Name → forward and draft in milliseconds a token; None: as recorded.
STRETCHES: dict[str, tuple[float, float | None] | None] = {
    "recorded": None,
    "forward 30": (30.0, None),
    "forward 30 draft 2": (30.0, 2.0),
    "forward 70 draft 12": (70.0, 12.0),
}

DEFAULT: Mapping[str, Any] = {"mode": "auto", "depth_policy": "optimal", "tree": "off"}
CLOUD_ONLY: Mapping[str, Any] = {"mode": "cloud-only"}
OPTIMAL: Mapping[str, Any] = {
    "mode": "speculative",
    "pipeline": "off",
    "depth_policy": "optimal",
    "tree": "off",
}
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
PIPELINED_LENGTHS = (2, 4, 8, 16)


def fixed(num_draft_tokens: int, pipeline: str = "off") -> dict[str, Any]:
    """Returns the options of rounds of one length."""
    length = {"depth_policy": "fixed", "num_speculative_tokens": num_draft_tokens}
    return {"mode": "speculative", "pipeline": pipeline, **length}


FIXED_SETTINGS: dict[str, Mapping[str, Any]] = {
    "cloud-only": CLOUD_ONLY,
    **{f"rounds of {n}": fixed(n) for n in LENGTHS},
    **{f"pipelined rounds of {n}": fixed(n, "on") for n in PIPELINED_LENGTHS},
}


# By hand, for a busy hour of two shared cores (docs/controller.md).
BUSY = {"drift": 0.2, "drift_s": 0.3, "jitter": 0.15}


@dataclass(frozen=True, slots=True)
class Case:
    """Holds one case; `set_name` is a pair's and a temperature's, as the simulator replays it. Forwards of a busy one
    vary."""

    set_name: str
    num_tokens: int
    rtt_ms: float
    stretch: str
    is_later: bool
    is_busy: bool = False

    @property
    def pair(self) -> str:
        """Returns the pair, "prose/first-layers" say."""
        return self.set_name.split(" ")[0]

    def __str__(self) -> str:
        when = "later" if self.is_later else "first"
        busy = ", busy" if self.is_busy else ""
        return (
            f"{self.set_name}, {self.num_tokens} tokens, RTT {self.rtt_ms:g} ms, {self.stretch}, {when}{busy}"
        )

    def place(self) -> Place:
        """Returns what its parts take."""
        place = self._idle_place()
        return replace(place, verifier={**place.verifier, **BUSY}) if self.is_busy else place

    def _idle_place(self) -> Place:
        if (stretched := STRETCHES[self.stretch]) is None:
            return recorded_place(self.set_name, self.rtt_ms)
        forward_ms, draft_ms = stretched
        token_ms = TOKEN_SHARE * forward_ms
        verifier = {"step_ms": forward_ms - token_ms, "token_ms": token_ms}
        return recorded_place(self.set_name, self.rtt_ms, verifier, draft_ms)

    def play(self, edge: Mapping[str, Any]) -> float:
        """Returns seconds a token with these options, the first token of each text left out."""
        texts = bank()[self.set_name].texts
        orders = [[text] for text in texts]
        if self.is_later:
            orders = [
                [*(texts[(i + 1 + j) % len(texts)] for j in range(NUM_BEFORE)), texts[i]]
                for i in range(len(texts))
            ]
        copied = {"draft_strategy": PROMPT_LOOKUP} if self.pair.endswith(f"/{PROMPT_LOOKUP}") else {}
        return play_last(orders, self.place(), {**edge, **copied}, self.num_tokens).tpot_ms / 1e3


@lru_cache(1)
def bank() -> dict[str, TraceSet]:
    """Returns every recorded set of the bank by its name."""
    return {each.name: each for name in TARGETS for each in load_traces(TRACES / f"bank-{name}.npz")}


def recorded_place(
    set_name: str,
    rtt_ms: float,
    verifier: Mapping[str, float] | None = None,
    draft_token_ms: float | None = None,
    times: PairTimes | None = None,
) -> Place:
    """Returns what a recorded set's parts take (None: what was recorded with it), with a stretched forward and drafted
    token where given."""
    times = bank()[set_name].times if times is None else times
    assert times is not None, f"{set_name} has no times"
    draft = dict(times["draft"])
    if draft_token_ms is not None and "token_ms" in draft:
        draft["token_ms"] = draft_token_ms
    own = {"send_ms": SEND_MS, "receive_ms": SEND_MS}
    return Place(rtt_ms, dict(verifier or times["verifier"]) | own, draft, own | {"commit_ms": COMMIT_MS})


def play_last(
    orders: Sequence[Sequence[TextTrace]], place: Place, edge: Mapping[str, Any], num_tokens: int
) -> Total:
    """Returns the total of the last text of each edge, which those before it taught."""
    played = play_edges(orders, place, edge, num_prompt_tokens=NUM_PROMPT_TOKENS, num_tokens=num_tokens)
    return total_of([each[-1] for each in played])


def all_cases() -> list[Case]:
    """Returns every case there is."""
    parts = (list(bank()), NUM_TOKENS, RTTS_MS, list(STRETCHES), (False, True))
    return [Case(*each) for each in itertools.product(*parts)]


def draw_cases(num_cases: int, seed: int) -> list[Case]:
    """Returns so many cases of every pair, drawn by the seed."""
    chance, found = random.Random(seed), list[Case]()
    by_pair: dict[str, list[Case]] = {}
    for case in all_cases():
        by_pair.setdefault(case.pair, []).append(case)
    for own in by_pair.values():
        found += chance.sample(own, num_cases)
    return found


@dataclass(frozen=True, slots=True)
class Rivals:
    """Holds what fixed settings take in one case, in seconds a token."""

    by_name: Mapping[str, float]

    @property
    def best(self) -> str:
        """Returns the name of the fastest."""
        return min(self.by_name, key=self.by_name.__getitem__)

    @property
    def best_s(self) -> float:
        """Returns the fastest setting's time."""
        return min(self.by_name.values())

    @property
    def best_length_s(self) -> float:
        """Returns the time of the best length of synchronous rounds."""
        return min(self.by_name[f"rounds of {n}"] for n in LENGTHS)

    @property
    def cloud_only_s(self) -> float:
        """Returns the target's own time."""
        return self.by_name["cloud-only"]


def rivals_of(case: Case) -> Rivals:
    """Plays every fixed setting."""
    return Rivals({name: case.play(edge) for name, edge in FIXED_SETTINGS.items()})


def power_mean(ratios: Sequence[float], exponent: float = 8.0) -> float:
    """Returns the power mean, by which constants are fitted: it is near the mean where all cases are alike,
    and near the worst where one is far off."""
    mean = math.fsum(ratio**exponent for ratio in ratios) / len(ratios)
    return float(mean ** (1 / exponent))
