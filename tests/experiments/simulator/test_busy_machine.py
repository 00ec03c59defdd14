"""Forwards that vary as on a machine that has other things to do."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks.controller.bank import Case
from outrider.experiments.simulator.parts.times import BusyMachine, VerifierTimes


def logs_of(times: VerifierTimes, every_s: float, num: int, seed: str = "a") -> list[float]:
    machine = BusyMachine(times, seed)
    return [math.log(machine.factor(number * every_s)) for number in range(num)]


def test_factors_vary_by_what_is_given() -> None:
    assert set(logs_of(VerifierTimes(), 0.1, 100)) == {0.0}
    drifting = logs_of(VerifierTimes(drift=0.2, drift_s=0.3), 0.3, 20_000)
    assert statistics.pstdev(drifting) == pytest.approx(0.2, rel=0.05)
    assert statistics.correlation(drifting[:-1], drifting[1:]) == pytest.approx(1 / math.e, abs=0.03)
    jittering = logs_of(VerifierTimes(jitter=0.15), 0.3, 20_000)
    assert statistics.pstdev(jittering) == pytest.approx(0.15, rel=0.05)
    assert abs(statistics.correlation(jittering[:-1], jittering[1:])) < 0.03


def test_settings_that_are_compared_meet_the_same_load() -> None:
    times = VerifierTimes(drift=0.2)
    seldom, often = logs_of(times, 0.1, 100), logs_of(times, 0.01, 1000)
    assert often[::10] == pytest.approx(seldom)
    assert logs_of(times, 0.1, 100, seed="b") != seldom


def test_a_busy_case_takes_other_times_and_the_same_ones_again() -> None:
    edge = {"mode": "cloud-only"}
    idle, busy = (
        Case("tables/trained T=0", 32, 5, "recorded", is_later=False, is_busy=is_busy)
        for is_busy in (False, True)
    )
    assert busy.play(edge) == busy.play(edge) != idle.play(edge)
    assert str(busy) == f"{idle}, busy"
