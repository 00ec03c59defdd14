"""Steps that follow one another on the event loop, and answers that are still being written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud_verifier.engine import driver as driver_module
from outrider.cloud_verifier.engine.delivery import Delivery
from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.common.clock import SYSTEM_CLOCK


class Answering:
    """An engine with work for `num_steps` short steps, each of which answers; a write takes until `may_write`."""

    expected_step_s = seconds_to_gather = 0.0
    seconds_to_sweep = 10.0
    num_arrived, is_running, clock = 0, True, SYSTEM_CLOCK
    backend = SimpleNamespace(device="cpu")

    def __init__(self, num_steps: int) -> None:
        self.num_jobs = num_steps
        self.num_steps = 0
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
