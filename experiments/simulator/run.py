"""Plays a system: virtual time from its first request to its last, or to the end that the system sets."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.common.errors import UsageError
from outrider.common.methods import sends_support
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.session.factory import Surroundings
from outrider.experiments.simulator.config import EdgePlan, System, VerifierPlan
from outrider.experiments.simulator.figures.tally import Tally
from outrider.experiments.simulator.parts.drafts import TracedText, load_acceptance
from outrider.experiments.simulator.parts.edges import (
    Ask,
    Follow,
    RequestLog,
    SimulatedEdge,
    draw_asks,
    follow,
)
from outrider.experiments.simulator.parts.network import Network, Site
from outrider.experiments.simulator.parts.verifier import SimulatedVerifier, VerifierTally
from outrider.experiments.simulator.world.standins import VirtualClock, virtual_threads
from outrider.experiments.simulator.world.world import World

NUM_SLICES = 200  # of virtual time, between which progress is told
GC_THRESHOLDS = (100_000, 50, 1000)  # objects here live long; Python's own would look at all of them often

Progress = Callable[[float, float], None]
"""Told (virtual seconds played, wall seconds so far)."""
OnRequest = Callable[[RequestLog], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Is a part of a system whose verifiers share no edges: every `of`-th verifier of each group, from
    `number` on."""

    number: int = 0
    of: int = 1

    def has(self, place: int) -> bool:
        """Returns whether the verifier at `place` belongs to this part."""
        return place % self.of == self.number


WHOLE = Part()


@dataclass(slots=True)
class Played:
    """Holds what happened."""

    system: System
    tallies: list[Tally]  # by group of edges
    verifiers: list[VerifierTally] = field(default_factory=list)
    seconds: float = 0.0  # played
    wall_s: float = 0.0
    num_events: int = 0


def play(
    system: System,
    on_progress: Progress | None = None,
    *,
    follow_session: Follow = follow,
    on_request: OnRequest | None = None,
    asks: Sequence[Sequence[Ask]] | None = None,
    traces: Sequence[TracedText] | None = None,
    part: Part = WHOLE,
) -> Played:
    """Plays a system. The same system gives the same history, in any process.

    `follow_session` runs each request, `on_request` hears of its end. `asks` are each edge's requests,
    `traces` the texts of all of them, in place of what the groups say.
    """
    start_s = time.perf_counter()
    world = World()
    stage = _Stage(world, system, part, _Given(follow_session, on_request, asks, traces))
    with _prepared():
        try:
            stage.build()
            seconds = _run(world, stage, on_progress, start_s)
        finally:
            world.close()
    return Played(
        system,
        stage.tallies,
        [each.tally for each in stage.verifiers],
        seconds,
        time.perf_counter() - start_s,
        world.num_events,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    follow: Follow
    on_request: OnRequest | None
    asks: Sequence[Sequence[Ask]] | None
    traces: Sequence[TracedText] | None


class _Stage:
    """Holds everything that is in the world."""

    def __init__(self, world: World, system: System, part: Part, given: _Given) -> None:
        self.network = Network(world)
        self.tallies = [Tally(system.config.warmup_s) for _ in system.edges]
        self.verifiers: list[SimulatedVerifier] = []
        self.num_wanted: int | None = 0  # requests in all; None: some edges go on for ever
        self.num_ended = 0
        self.last_end_s = 0.0
        self.seconds = system.config.seconds
        self._world, self._system, self._part, self._given = world, system, part, given
        chance = random.Random(f"secrets {system.config.seed}")
        self._surroundings = Surroundings(
            VirtualClock(world),
            virtual_threads(world),
            self.network.create_link,
            lambda: chance.randbytes(16),
            is_local=lambda config: False,  # nothing is computed on shared processors here
        )

    def build(self) -> None:
        texts, places = _load_texts(self._system, self._given)
        groups = {each.group.name: self._add_verifiers(each, texts) for each in self._system.verifiers}
        balances = {each.group.name: each.group.balance for each in self._system.verifiers}
        number = 0
        for place, plan in enumerate(self._system.edges):
            for _ in range(plan.group.count):
                verifiers = groups[plan.verifiers]
                if self._part == WHOLE or self._part.has(number % len(verifiers)):
                    site = Site(number, plan.link, plan.times, verifiers, balances[plan.verifiers])
                    self._add_edge(site, plan, place, texts, places[place])
                number += 1

    def _add_verifiers(
        self, plan: VerifierPlan, texts: Sequence[TracedText]
    ) -> list[SimulatedVerifier | None]:
        found: list[SimulatedVerifier | None] = []
        for place in range(plan.group.count):
            made = None
            if self._part.has(place):
                name = f"{plan.group.name}-{place}"
                made = SimulatedVerifier(
                    self._world, name, plan.config, plan.times, plan.draft, texts, plan.group.kv_tokens
                )
                self.verifiers.append(made)
            found.append(made)
        return found

    def _add_edge(
        self, site: Site, plan: EdgePlan, place: int, texts: list[TracedText], own_texts: range
    ) -> None:
        given, number = self._given, site.number
        chance = random.Random(f"edge {number} of {self._system.config.seed}")
        if given.asks is None:
            asks, num_asks = draw_asks(plan, own_texts, chance), plan.group.requests
        else:
            asks, num_asks = iter(given.asks[number]), len(given.asks[number])
        if self.num_wanted is not None:
            self.num_wanted = None if num_asks is None else self.num_wanted + num_asks
        tally = self.tallies[place]

        def end(log: RequestLog) -> None:
            self.num_ended += 1
            self.last_end_s = max(self.last_end_s, log.end_s)
            tally.add(log)
            if given.on_request is not None:
                given.on_request(log)

        address = self.network.add(site)
        edge = SimulatedEdge(
            self._world, plan, number, address, texts, asks, chance, given.follow, end, self._surroundings
        )
        self._world.start(edge.run)


def _load_texts(system: System, given: _Given) -> tuple[list[TracedText], list[range]]:
    texts: list[TracedText] = list(given.traces or ())
    places: list[range] = []
    for place, plan in enumerate(system.edges):
        if given.traces is not None:
            found, new = texts, range(len(texts))
        else:
            found = load_acceptance(plan.group.acceptance, f"edges[{place}]: acceptance", system.config.seed)
            new = range(len(texts), len(texts) + len(found))
            texts += found
        _check_texts(plan, found, f"edges[{place}]")
        places.append(new)
    return texts, places


def _check_texts(plan: EdgePlan, texts: Sequence[TracedText], where: str) -> None:
    """Raises `UsageError` where the texts do not have what a group's settings ask of a draft."""
    has_gate = plan.config.gate.use is not GateUse.OFF
    has_trees = plan.config.tree.use not in (None, "off")  # by default they are left out where they cannot be
    if has_gate and has_trees:
        raise UsageError(f"{where}: edge: gate: judges no simulated trees; leave gate or tree out")
    if has_trees and sends_support(method := plan.config.verification.method):
        raise UsageError(
            f"{where}: edge: tree: simulated trees go with coupled or typical, not with {method}"
        )
    if has_gate and not all(each.signals(0) for each in texts):
        raise UsageError(
            f"{where}: acceptance: a gate asks how sure the draft is: name traces that were recorded"
        )
    if has_trees and not all(each.ranks for each in texts):
        raise UsageError(
            f"{where}: acceptance: {plan.group.acceptance!r} was recorded without what trees need; give a chance, or "
            "traces of a draft model"
        )


def _run(world: World, stage: _Stage, on_progress: Progress | None, start_s: float) -> float:
    seconds = stage.seconds
    for number in range(1, NUM_SLICES + 1):
        world.run(seconds * number / NUM_SLICES)
        if on_progress is not None:
            on_progress(world.now_s, time.perf_counter() - start_s)
        if stage.num_ended == stage.num_wanted:
            return stage.last_end_s
    return seconds


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Sets few garbage collections, and no log lines of repairs and refusals: they are counted."""
    thresholds, logger_levels = gc.get_threshold(), {}
    for name in ("outrider.edge_client", "outrider.cloud_verifier"):
        logger_levels[name] = logging.getLogger(name).level
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        for name, level in logger_levels.items():
            logging.getLogger(name).setLevel(level)
