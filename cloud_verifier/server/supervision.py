"""A verifier under systemd: reports that it serves, that it drains, and that its engine makes progress.

An event loop that hangs reports nothing, and neither is an engine reported alive that has work and does no
step for half an interval of the watchdog. After a whole interval without a report systemd restarts the
service.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from outrider.common.process.sd_notify import Notifier

BEATS_AN_INTERVAL = 2


class Engine(Protocol):
    """Declares what is read of an engine."""

    @property
    def is_running(self) -> bool:
        """Returns whether its thread runs."""

    @property
    def num_jobs(self) -> int:
        """Returns the number of requests that wait or are being computed."""

    @property
    def num_steps(self) -> int:
        """Returns the number of steps so far."""


class Supervision:
    """Notifies systemd of the verifier's state."""

    def __init__(self, engine: Engine, notifier: Notifier | None = None) -> None:
        self._engine = engine
        self._notifier = notifier or Notifier()
        self._num_steps_seen = -1
        self._beating: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """Reports that the verifier serves, and begins the watchdog's reports. Called on the event loop."""
        self._notifier.ready(status)
        if self._notifier.watchdog_s is not None:
            self._beating = asyncio.create_task(self._beat(self._notifier.watchdog_s / BEATS_AN_INTERVAL))

    def stopping(self) -> None:
        """Reports that the verifier drains; the watchdog's reports continue."""
        self._notifier.stopping("draining")

    def close(self) -> None:
        """Ends the watchdog's reports."""
        if self._beating is not None:
            self._beating.cancel()

    def makes_progress(self) -> bool:
        """Returns whether the engine runs, and has nothing to do or did a step since the last call."""
        before, self._num_steps_seen = self._num_steps_seen, self._engine.num_steps
        return self._engine.is_running and (not self._engine.num_jobs or self._num_steps_seen != before)

    async def _beat(self, interval_s: float) -> None:
        while True:
            if self.makes_progress():
                self._notifier.alive()
            await asyncio.sleep(interval_s)
