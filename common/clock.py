"""The clock of both sides: code that measures time or waits takes a `Clock`, so tests can pass theirs."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Measures time and waits. Seconds count from an arbitrary beginning and never go back."""

    def now(self) -> float:
        """Returns the time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Returns after `seconds`; at once where they are not above 0."""


class SystemClock(Clock):
    """Reads the machine's monotonic clock, which `time.perf_counter_ns` counts in nanoseconds."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
