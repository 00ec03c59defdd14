"""A point in virtual time: the simulator with the pair's recorded acceptance and times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.controller.bank import NUM_BEFORE, bank, play_last, recorded_place
from benchmarks.real.cases import RealCase
from benchmarks.real.points import RealPoint


def virtual_ms(point: RealPoint, cases: Sequence[RealCase]) -> dict[str, float]:
    """Returns the milliseconds a token of each case, over the pair's recorded texts."""
    return {case.name: round(_play(point, case), 3) for case in cases}


def _play(point: RealPoint, case: RealCase) -> float:
    texts = bank()[point.traces].texts
    num_before = 0 if point.is_first else NUM_BEFORE
    orders = [
        [texts[(place + number) % len(texts)] for number in range(num_before + 1)]
        for place in range(len(texts))
    ]
    verifier = {"step_ms": point.min_forward_ms} if point.min_forward_ms else None
    place = recorded_place(point.traces, point.rtt_ms, verifier, point.min_draft_ms or None)
    return play_last(orders, place, case.settings, point.num_tokens).tpot_ms
