"""The driver: a step's answers are sent before its times are noted, on the event loop and beside it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.common.clock import SYSTEM_CLOCK


class ScriptedEngine:
    """Answers its one job in one step; the answer is sent in a later turn of the event loop, as a stream's is."""

    clock = SYSTEM_CLOCK
    backend = SimpleNamespace(device="cpu")
    seconds_to_sweep = 60.0
    seconds_to_gather = 0.0
    is_running = False
    num_arrived = 0

    def __init__(self, expected_step_s: float) -> None:
        self.expected_step_s = expected_step_s
        self.num_jobs = 1
        self.done: list[str] = []
        self.on_job: Callable[[], None] | None = None
        self.loop = asyncio.get_running_loop()
        self.is_observed = asyncio.Event()

    def step(self) -> bool:
        if not self.num_jobs:
            return False
        self.done.append("step")
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
