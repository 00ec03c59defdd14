"""Steps that follow one another on the event loop, and answers that are still being written."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud_verifier.engine import driver as driver_module
from outrider.cloud_verifier.engine.delivery import Delivery, WaitAllowance
from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.common.clock import SYSTEM_CLOCK


class Answering:
    """An engine with work for `num_steps` short steps, each of which answers; a write takes until `may_write`."""

    seconds_to_gather = 0.0
    seconds_to_sweep = 10.0
    num_arrived, is_running, clock = 0, True, SYSTEM_CLOCK
    backend = SimpleNamespace(device="cpu")

    def __init__(self, num_steps: int) -> None:
        self.expected_step_s = 0.0
        self.num_jobs = num_steps
        self.num_steps = 0
        self.began = threading.Event()  # a step on the thread
        self.on_job: Callable[[], None] | None = None
        self.delivery = Delivery()
        self.may_write: dict[int, asyncio.Event] = {}  # by step; others are written at once
        self.writes: list[asyncio.Task[None]] = []
        self.is_done = asyncio.Event()

    def step(self) -> bool:
        if not self.num_jobs:
            return False
        self.num_jobs -= 1
        self.num_steps += 1
        self.writes.append(asyncio.create_task(self._write(self.num_steps)))
        if not self.num_jobs:
            self.is_done.set()
        return True

    def observe(self) -> None:
        pass

    async def _write(self, step: int) -> None:
        with self.delivery.writing():
            if (event := self.may_write.get(step)) is not None:
                await event.wait()

    def start(self) -> EngineDriver:
        engine: Any = self
        driver = EngineDriver(engine, delivery=self.delivery)
        driver.start()
        assert self.on_job is not None
        self.on_job()
        return driver

    async def stop(self, driver: EngineDriver) -> None:
        await driver.stop()
        for each in self.writes:
            each.cancel()


async def turns(num: int = 60) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_a_step_waits_until_the_answers_to_the_step_before_the_last_one_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "MAX_DELIVERY_S", 60.0)

    async def drive() -> list[int]:
        engine = Answering(8)
        engine.may_write = {3: asyncio.Event(), 4: asyncio.Event()}
        driver, seen = engine.start(), []
        for step in (3, 4):
            await turns()
            seen.append(engine.num_steps)
            engine.may_write[step].set()
        await asyncio.wait_for(engine.is_done.wait(), 10.0)
        await engine.stop(driver)
        return seen

    # Step 4 was computed while 3's answers were written, 5 waited for them, and 6 for 4's.
    assert asyncio.run(drive()) == [4, 5]


def test_a_client_that_reads_nothing_costs_the_others_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_DELIVERY_S", 0.5)

    async def drive() -> float:
        engine = Answering(40)
        engine.may_write = {3: asyncio.Event()}
        begin_s, driver = time.monotonic(), engine.start()
        await asyncio.wait_for(engine.is_done.wait(), 60.0)
        seconds = time.monotonic() - begin_s
        await engine.stop(driver)
        return seconds

    assert 0.5 <= asyncio.run(drive()) < 0.5 * 40 / 2


def test_a_client_that_reads_each_answer_too_late_costs_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "MAX_DELIVERY_S", 0.05)

    class Late(Answering):
        async def _write(self, step: int) -> None:
            with self.delivery.writing():
                await asyncio.sleep(0.04)

    async def drive() -> float:
        engine = Late(60)
        begin_s, driver = time.monotonic(), engine.start()
        await asyncio.wait_for(engine.is_done.wait(), 60.0)
        seconds = time.monotonic() - begin_s
        await engine.stop(driver)
        return seconds

    assert asyncio.run(drive()) < 0.04 * 60 / 4, "each step waited for"


def test_waits_take_a_share_of_the_time_and_one_longest_wait_more() -> None:
    allowance, now_s, waited_s = WaitAllowance(0.005, 0.25), 100.0, 0.0
    for _ in range(200):
        now_s += 0.002  # a step
        wait_s = min(0.004, allowance.left_s(now_s))
        if wait_s > 0.0:
            now_s, waited_s = now_s + wait_s, waited_s + wait_s
            allowance.waited(now_s)
    assert 0.2 * (now_s - 100.0) < waited_s <= 0.005 + 0.25 * (now_s - 100.0)
    assert allowance.left_s(now_s + 60.0) == 0.005


def test_a_step_on_the_thread_is_not_joined_by_another_one_when_what_was_waited_for_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait for the answers to step 3 is over, step 5 is long, and then they are written."""
    monkeypatch.setattr(driver_module, "MAX_DELIVERY_S", 0.01)
    may_end, running, most = threading.Event(), [0], [0]

    class Long(Answering):
        def step(self) -> bool:
            if self.num_steps < 4:
                return super().step()
            running[0] += 1
            most[0] = max(most[0], running[0])
            self.began.set()
            may_end.wait(0.5)
            running[0] -= 1
            self.num_jobs = 0
            return True

    async def drive() -> None:
        engine = Long(5)
        engine.may_write = {3: asyncio.Event()}
        driver = engine.start()
        while engine.num_steps < 4:
            await asyncio.sleep(0)
        engine.expected_step_s = math.inf
        while not engine.began.is_set():
            await asyncio.sleep(0.001)
        engine.expected_step_s = 0.0  # the next one would be on the loop, beside this one
        engine.may_write[3].set()
        await turns()
        may_end.set()
        await engine.stop(driver)

    asyncio.run(drive())
    assert most[0] == 1
