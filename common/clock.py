"""The one clock of both sides: what measures time or waits takes a `Clock`, so that tests and the simulator give theirs."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Reads and spends time. Seconds, from an arbitrary beginning; never goes back."""

    def now(self) -> float:
        """Returns the time in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Returns after `seconds`; at once where they are not above 0."""
        ...


class SystemClock:
    """The machine's monotonic clock, which `time.perf_counter_ns` counts in nanoseconds."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
