"""A point in virtual time: the simulator with the pair's recorded acceptance, and what its models take now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.controller.bank import NUM_BEFORE, bank, play_last, recorded_place
from benchmarks.controller.record_bank import pairs_times
from benchmarks.real.cases import RealCase
from benchmarks.real.points import RealPoint
from benchmarks.real.running import find_draft
from outrider.cloud_verifier.backends.lean import one_thread

Times = Mapping[str, Mapping[str, float]]


def measured_times(point: RealPoint) -> Times:
    """Returns what the pair's models take on this machine, by one thread."""
    folder, draft = find_draft(point)
    with one_thread():
        ((_, times),) = pairs_times(folder, [draft])
    return times


def virtual_ms(point: RealPoint, cases: Sequence[RealCase], times: Times | None = None) -> dict[str, float]:
    """Returns the milliseconds a token of each case, over the pair's recorded texts; without `times` as recorded."""
    return {case.name: round(_play(point, case, times), 3) for case in cases}


def _play(point: RealPoint, case: RealCase, times: Times | None) -> float:
    texts = bank()[point.traces].texts
    num_before = 0 if point.is_first else NUM_BEFORE
    orders = [
        [texts[(place + number) % len(texts)] for number in range(num_before + 1)]
        for place in range(len(texts))
    ]
    verifier = {"step_ms": point.min_forward_ms} if point.min_forward_ms else None
    place = recorded_place(point.traces, point.rtt_ms, verifier, point.min_draft_ms or None, times)
    return play_last(orders, place, case.settings, point.num_tokens).tpot_ms
