"""The driver: a step's answers are sent before its times are noted, on the event loop and beside it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.common.clock import SYSTEM_CLOCK


class ScriptedEngine:
    """Answers its one job in one step; the answer is sent in a later turn of the event loop, as a stream's is."""

    clock = SYSTEM_CLOCK
    seconds_to_sweep = 60.0
    seconds_to_gather = 0.0
    is_running = False
    num_arrived = 0

    def __init__(self, expected_step_s: float, device: str = "cpu") -> None:
        self.expected_step_s = expected_step_s
        self.backend = SimpleNamespace(device=device)
        self.num_jobs = 1
        self.done: list[str] = []
        self.on_job: Callable[[], None] | None = None
        self.loop = asyncio.get_running_loop()
        self.is_observed = asyncio.Event()

    def step(self) -> bool:
        if not self.num_jobs:
            return False
        self.done.append("step")
        self.is_on_loop = threading.current_thread() is threading.main_thread()
        self.num_jobs = 0
        self.loop.call_soon_threadsafe(self.done.append, "answer sent")
        return True

    def observe(self) -> None:
        self.done.append("observed")
        self.is_observed.set()


@pytest.mark.parametrize("expected_step_s", [0.0, math.inf], ids=["on the loop", "on a thread"])
def test_answers_are_sent_before_the_steps_times_are_noted(expected_step_s: float) -> None:
    async def drive() -> list[str]:
        engine: Any = ScriptedEngine(expected_step_s)
        driver = EngineDriver(engine)
        driver.start()
        engine.on_job()
        await asyncio.wait_for(engine.is_observed.wait(), 5.0)
        await driver.stop()
        done: list[str] = engine.done
        return done

    assert asyncio.run(drive()) == ["step", "answer sent", "observed"]


@pytest.mark.parametrize(("device", "is_on_loop"), [("cpu", True), ("cuda:1", False)])
def test_a_short_step_is_run_on_the_event_loop_unless_it_waits_for_a_gpu(
    device: str, is_on_loop: bool
) -> None:
    async def drive() -> bool:
        engine: Any = ScriptedEngine(0.0, device)
        driver = EngineDriver(engine)
        driver.start()
        engine.on_job()
        await asyncio.wait_for(engine.is_observed.wait(), 5.0)
        await driver.stop()
        found: bool = engine.is_on_loop
        return found

    assert asyncio.run(drive()) is is_on_loop


@pytest.mark.parametrize("expected_step_s", [0.0, math.inf], ids=["on the loop", "on a thread"])
def test_an_engine_that_stopped_for_a_bug_computes_nothing_more(
    expected_step_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ScriptedEngine):
        def step(self) -> bool:
            super().step()
            raise RuntimeError("a bug")

    async def drive() -> list[str]:
        engine: Any = Broken(expected_step_s)
        driver = EngineDriver(engine)
        driver.start()
        engine.on_job()
        while engine.is_running:
            await asyncio.sleep(0)
        engine.num_jobs = 1
        engine.on_job()
        for _ in range(20):  # turns of the loop, of which a step needs a few
            await asyncio.sleep(0)
        await driver.stop()
        return list(engine.done)

    assert asyncio.run(drive()).count("step") == 1
    assert caplog.text.count("the engine stopped") == 1
