"""A point in virtual time: the simulator with the pair's recorded acceptance, and what its models take now."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.controller.bank import NUM_BEFORE, bank, play_last, recorded_place
from benchmarks.controller.record_bank import time_pairs
from benchmarks.real.cases import RealCase
from benchmarks.real.points import RealPoint
from benchmarks.real.running import find_draft
from outrider.cloud_verifier.backends.lean import one_thread
from outrider.experiments.shared.acceptance_traces import PairTimes


def measured_times(point: RealPoint) -> PairTimes:
    """Returns what the pair's models take on this machine, by one thread."""
    folder, draft = find_draft(point.target, point.draft)
    with one_thread():
        ((_, times),) = time_pairs(folder, [draft])
    return times


def virtual_ms(point: RealPoint, cases: Sequence[RealCase], times: PairTimes) -> dict[str, float]:
    """Returns the milliseconds a token of each case, over the pair's recorded texts."""
    return {case.name: round(_play(point, case, times), 3) for case in cases}


def _play(point: RealPoint, case: RealCase, times: PairTimes) -> float:
    texts = bank()[point.traces].texts
    num_before = 0 if point.is_first else NUM_BEFORE
    orders = [
        [texts[(place + number) % len(texts)] for number in range(num_before + 1)]
        for place in range(len(texts))
    ]
    verifier = {"step_ms": point.min_forward_ms} if point.min_forward_ms else None
    place = recorded_place(point.traces, point.rtt_ms, verifier, point.min_draft_ms or None, times)
    return play_last(orders, place, case.settings, point.num_tokens).tpot_ms
