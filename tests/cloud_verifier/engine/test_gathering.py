"""Steps that wait a moment for sessions that come back soon: when, for how long, and never for those that are late."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.cloud_verifier.engine.gathering import MAX_WAIT_SHARE, SLACK_S, Gathering, Pause
from outrider.common.clock import SYSTEM_CLOCK

FIXED_S, TOKEN_S = 0.010, 0.001


def gathering() -> Gathering:
    """Knows that a step takes 10 ms and 1 ms for each token."""
    found = Gathering()
    for num_tokens in (1, 5, 10):
        found.ended(num_tokens, FIXED_S + TOKEN_S * num_tokens)
    return found


def pause_of(*pauses_s: float) -> Pause:
    pause = Pause()
    for pause_s in pauses_s:
        pause.left_s = 1.0
        pause.end(1.0 + pause_s)
    return pause


def key(number: int) -> tuple[str, bytes]:
    return "default", bytes([number])


def test_a_step_waits_for_the_last_of_those_expected_within_its_share_of_the_fixed_time() -> None:
    steps = gathering()
    for number, pause_s in enumerate((0.002, 0.004, 0.009)):
        steps.left(key(number), pause_of(*[pause_s] * 50), now_s=5.0)
    assert steps.wait_s(5.001) == pytest.approx(0.003 + SLACK_S, abs=1e-6), "9 ms is beyond 70 % of 10"
    steps.arrived(key(1))
    assert steps.wait_s(5.0015) == pytest.approx(0.0005 + SLACK_S, abs=1e-6)
    steps.arrived(key(0))
    assert steps.wait_s(5.0016) == 0.0
    assert steps.has_waited
    steps.began()
    assert not steps.has_waited


def test_a_session_that_is_late_is_not_awaited_until_it_was_back() -> None:
    steps, pause = gathering(), pause_of(*[0.002] * 50)
    steps.left(key(0), pause, now_s=5.0)
    assert steps.wait_s(5.0) > 0
    assert steps.wait_s(5.0 + 0.002 + 2 * SLACK_S) == 0.0
    steps.began()
    assert steps.wait_s(5.1) == 0.0
    steps.arrived(key(0))
    pause.end(5.2)
    steps.began()
    steps.left(key(0), pause, now_s=5.3)
    assert steps.wait_s(5.3) == 0.0, "it takes far longer now and then: its pause is not to be relied on"


def test_many_that_come_one_after_the_other_delay_a_step_no_longer_than_its_share() -> None:
    steps, now_s = gathering(), 5.0
    for number in range(100):
        steps.left(key(number), pause_of(*[0.003] * 50), now_s)
        now_s += 0.001
        if not steps.wait_s(now_s):
            break
    assert now_s - 5.001 <= MAX_WAIT_SHARE * FIXED_S + 1e-9


def test_nobody_is_awaited_before_anything_is_known() -> None:
    unmeasured = Gathering()
    unmeasured.left(key(0), pause_of(0.002), now_s=5.0)
    assert unmeasured.wait_s(5.0) == 0.0, "no step was measured"
    unmeasured.ended(5, 0.015)
    assert unmeasured.wait_s(5.0) == 0.0, "steps of one size have no fixed time"
    steps = gathering()
    steps.left(key(0), Pause(), now_s=5.0)
    assert steps.wait_s(5.0) == 0.0, "a session that was never back"


def test_an_irregular_session_is_awaited_by_its_deviation_or_not_at_all() -> None:
    regular, irregular = pause_of(*[0.003] * 50), pause_of(*[0.001, 0.005] * 25)
    assert regular.expected_s == pytest.approx(0.003 + SLACK_S, abs=1e-6)
    assert irregular.expected_s > 0.006


class WaitingEngine:
    """Asks to wait as often as it is told, then steps once."""

    def __init__(self, *waits_s: float) -> None:
        self.clock, self.backend = SYSTEM_CLOCK, SimpleNamespace(device="cpu")
        self.waits_s = list(waits_s)
        self.num_jobs, self.num_arrived, self.expected_step_s, self.seconds_to_sweep = 1, 1, 0.0, 60.0
        self.is_running, self.on_job = False, None
        self.stepped = asyncio.Event()

    @property
    def seconds_to_gather(self) -> float:
        return self.waits_s.pop(0) if self.waits_s else 0.0

    def step(self) -> bool:
        self.num_jobs = 0
        self.stepped.set()
        return True


def test_the_driver_steps_when_the_wait_is_over_or_a_job_arrives() -> None:
    async def run() -> None:
        patient = WaitingEngine(0.001, 0.001)
        driver = EngineDriver(patient)  # type: ignore[arg-type]
        driver.start()
        await asyncio.wait_for(patient.stepped.wait(), 10)
        assert not patient.waits_s, "it asked again after each wait"
        await driver.stop()

        hurried = WaitingEngine(60.0)
        driver = EngineDriver(hurried)  # type: ignore[arg-type]
        driver.start()
        while hurried.waits_s:
            await asyncio.sleep(0.001)
        assert not hurried.stepped.is_set()
        assert hurried.on_job is not None
        hurried.on_job()
        await asyncio.wait_for(hurried.stepped.wait(), 10)
        await driver.stop()

    begin_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - begin_s < 30
