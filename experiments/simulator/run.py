"""Plays a system: virtual time from its first request to its last, or to the end that the system sets."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from experiments.simulator.config import System
from experiments.simulator.drafts import TracedText, load_acceptance
from experiments.simulator.edges import Ask, Follow, RequestLog, SimulatedEdge, draw_asks, follow
from experiments.simulator.network import Network, Site
from experiments.simulator.product import product_in
from experiments.simulator.target import known_rows
from experiments.simulator.verifier import SimulatedVerifier
from experiments.simulator.world import World

NUM_SLICES = 200  # of virtual time, between which progress is told
GC_THRESHOLDS = (100_000, 50, 1000)  # objects here live long; Python's own would look at all of them often

Progress = Callable[[float, float], None]
"""Told (virtual seconds played, wall seconds so far)."""


@dataclass(slots=True)
class Played:
    """What happened. `requests` in the order in which they ended, those under way at the end last."""

    system: System
    requests: list[RequestLog] = field(default_factory=list)
    verifiers: list[SimulatedVerifier] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)  # by edge
    seconds: float = 0.0  # played
    wall_s: float = 0.0
    num_events: int = 0


def play(
    system: System,
    on_progress: Progress | None = None,
    follow_session: Follow = follow,
    asks: Sequence[Sequence[Ask]] | None = None,
    traces: Sequence[TracedText] | None = None,
) -> Played:
    """The same system gives the same history, in any process.

    `follow_session` runs each request. `asks` are each edge's requests, `traces` the texts of all of them,
    in place of what the groups say.
    """
    world = World()
    network = Network(world)
    read_rows = functools.partial(known_rows, world)
    played = Played(system)
    start_s = time.perf_counter()
    with _prepared(), product_in(world, system.config.seed, network.make_link, read_rows):
        try:
            _build(system, world, network, played, _Given(follow_session, asks, traces))
            _run(world, system.config.seconds, played, asks, on_progress, start_s)
        finally:
            world.close()
    for verifier in played.verifiers:
        assert not verifier.engine.observer.errors["internal"], "a verifier failed: its log says where"
    played.wall_s = time.perf_counter() - start_s
    played.num_events = world.num_events
    return played


@dataclass(frozen=True, slots=True)
class _Given:
    follow: Follow
    asks: Sequence[Sequence[Ask]] | None
    traces: Sequence[TracedText] | None


def _build(system: System, world: World, network: Network, played: Played, given: _Given) -> None:
    texts, places = _load_texts(system, given)
    verifiers: dict[str, list[SimulatedVerifier]] = {}
    for each in system.verifiers:
        group = each.group
        verifiers[group.name] = [
            SimulatedVerifier(
                world, f"{group.name}-{i}", each.config, each.times, each.draft, texts, group.kv_tokens
            )
            for i in range(group.count)
        ]
        played.verifiers += verifiers[group.name]
    balances = {each.group.name: each.group.balance for each in system.verifiers}
    for place, plan in enumerate(system.edges):
        for _ in range(plan.group.count):
            number = len(played.group_of)
            played.group_of.append(place)
            site = Site(number, plan.link, plan.times, verifiers[plan.verifiers], balances[plan.verifiers])
            chance = random.Random(f"edge {number} of {system.config.seed}")
            asks = draw_asks(plan, places[place], chance) if given.asks is None else iter(given.asks[number])
            address, on_end = network.add(site), played.requests.append
            edge = SimulatedEdge(world, plan, number, address, texts, asks, chance, given.follow, on_end)
            world.start(edge.run)


def _load_texts(system: System, given: _Given) -> tuple[list[TracedText], list[range]]:
    """All of them, and the places of each group's own."""
    if given.traces is not None:
        return list(given.traces), [range(len(given.traces))] * len(system.edges)
    texts: list[TracedText] = []
    places: list[range] = []
    for place, plan in enumerate(system.edges):
        found = load_acceptance(plan.group.acceptance, f"edges[{place}]: acceptance", system.config.seed)
        places.append(range(len(texts), len(texts) + len(found)))
        texts += found
    return texts, places


def _run(
    world: World,
    seconds: float,
    played: Played,
    asks: Sequence[Sequence[Ask]] | None,
    on_progress: Progress | None,
    start_s: float,
) -> None:
    wanted = _num_wanted(played) if asks is None else sum(map(len, asks))
    for number in range(1, NUM_SLICES + 1):
        world.run(seconds * number / NUM_SLICES)
        if on_progress is not None:
            on_progress(world.now_s, time.perf_counter() - start_s)
        if wanted is not None and len(played.requests) == wanted:
            break
    is_whole = wanted is not None and len(played.requests) == wanted
    played.seconds = max((log.end_s for log in played.requests), default=0.0) if is_whole else seconds


def _num_wanted(played: Played) -> int | None:
    """Requests in all, where every edge has an end."""
    plans = played.system.edges
    if any(plan.group.requests is None for plan in plans):
        return None
    return sum(plan.group.count * (plan.group.requests or 0) for plan in plans)


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Few garbage collections, and no log lines of repairs and refusals: they are counted."""
    thresholds, logger_levels = gc.get_threshold(), {}
    for name in ("edge_client", "cloud_verifier"):
        logger_levels[name] = logging.getLogger(name).level
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        for name, level in logger_levels.items():
            logging.getLogger(name).setLevel(level)
