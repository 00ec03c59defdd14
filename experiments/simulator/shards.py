"""Parts of a system in processes of their own, where no edge asks two verifiers. The figures are the same."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from outrider.experiments.shared.leash import end_with_parent
from outrider.experiments.simulator.config import System
from outrider.experiments.simulator.run import Part, Played, Progress, play

MIN_EDGES = 500  # a process takes a second to start


def num_parts(system: System, num_processes: int | None = None) -> int:
    """Returns into how many parts the system may be cut, for as many processes (default: the cores this
    one may use)."""
    if system.num_edges < MIN_EDGES or any(plan.group.requests is not None for plan in system.edges):
        return 1  # where all edges have an end, it ends with the last of all
    counts = [each.group.count for each in system.verifiers if each.group.balance == "edge"]
    if len(counts) < len(system.verifiers):
        return 1
    return min(*counts, num_processes or len(os.sched_getaffinity(0)))


def play_parts(
    system: System, on_progress: Progress | None = None, num_processes: int | None = None
) -> Played:
    """Plays a system as `play` does, on as many cores as there are."""
    count = num_parts(system, num_processes)
    if count == 1:
        return play(system, on_progress)
    start_s = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count - 1, mp_context=context, initializer=end_with_parent) as pool:
        parts = [Part(number, count) for number in range(count)]
        others = [pool.submit(functools.partial(play, system, part=part)) for part in parts[1:]]
        played = [play(system, on_progress, part=parts[0]), *(other.result() for other in others)]
    return _merged(system, played, time.perf_counter() - start_s)


def _merged(system: System, played: Sequence[Played], wall_s: float) -> Played:
    whole = played[0]
    for part in played[1:]:
        for tally, more in zip(whole.tallies, part.tallies, strict=True):
            tally.merge(more)
    order = [f"{each.group.name}-{i}" for each in system.verifiers for i in range(each.group.count)]
    verifiers = sorted((v for part in played for v in part.verifiers), key=lambda v: order.index(v.name))
    num_events = sum(part.num_events for part in played)
    return Played(system, whole.tallies, verifiers, whole.seconds, wall_s, num_events)
