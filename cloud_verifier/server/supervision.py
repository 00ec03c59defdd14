"""A verifier under systemd: says that it serves, that it drains, and that its engine gets on.

An event loop that hangs says nothing, and an engine that has work and does no step for half an interval of
the watchdog is not called alive either. After a whole interval of silence systemd restarts the service.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from outrider.common.process.sd_notify import Notifier

BEATS_AN_INTERVAL = 2


class Engine(Protocol):
    @property
    def is_running(self) -> bool: ...
    @property
    def num_jobs(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


class Supervision:
    def __init__(self, engine: Engine, notifier: Notifier | None = None) -> None:
        self._engine = engine
        self._notifier = notifier or Notifier()
        self._num_steps_seen = -1
        self._beating: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """It serves. Called on the event loop, whose task calls it alive from now on."""
        self._notifier.ready(status)
        if self._notifier.watchdog_s is not None:
            self._beating = asyncio.create_task(self._beat(self._notifier.watchdog_s / BEATS_AN_INTERVAL))

    def stopping(self) -> None:
        """It drains; the watchdog is still served."""
        self._notifier.stopping("draining")

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    def gets_on(self) -> bool:
        """Whether the engine runs, and has nothing to do or did a step since the last call."""
        before, self._num_steps_seen = self._num_steps_seen, self._engine.num_steps
        return self._engine.is_running and (not self._engine.num_jobs or self._num_steps_seen != before)

    async def _beat(self, interval_s: float) -> None:
        while True:
            if self.gets_on():
                self._notifier.alive()
            await asyncio.sleep(interval_s)
