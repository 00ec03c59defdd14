"""Computes when a packet leaves the bottleneck of one direction: at once, at a rate, or by a capacity trace.

Times are seconds since the link opened. `depart` is called in the order in which packets come.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import Protocol

from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.traces import OPPORTUNITY_BYTES, CapacityTrace, load_trace


class Bottleneck(Protocol):
    """Limits the rate of one direction."""

    def depart(self, now_s: float, num_bytes: int) -> float:
        """Returns the time at which the last of `num_bytes`, which come at `now_s`, has left."""
        ...


class _Unlimited:
    def depart(self, now_s: float, num_bytes: int) -> float:
        return now_s


class _FixedRate:
    def __init__(self, mbit: float) -> None:
        self._byte_s = 8 / (mbit * 1e6)
        self._free_s = 0.0

    def depart(self, now_s: float, num_bytes: int) -> float:
        free_s = self._free_s
        self._free_s = (now_s if now_s > free_s else free_s) + num_bytes * self._byte_s
        return self._free_s


class TraceRate:
    """Follows a capacity trace: opportunity number i is at `times_ms[i % n]` of round i // n through it."""

    def __init__(self, trace: CapacityTrace) -> None:
        self._times_ms, self._period_ms = trace.times_ms, trace.period_ms
        self._next = 0
        self._left = OPPORTUNITY_BYTES  # bytes of the next opportunity

    def _time_ms(self, number: int) -> int:
        rounds, index = divmod(number, len(self._times_ms))
        return rounds * self._period_ms + self._times_ms[index]

    def _first_from(self, time_ms: int) -> int:
        rounds = max(0, time_ms // self._period_ms - 1)  # the end of one is the beginning of the next
        while True:
            index = bisect_left(self._times_ms, time_ms - rounds * self._period_ms)
            if index < len(self._times_ms):
                return rounds * len(self._times_ms) + index
            rounds += 1

    def depart(self, now_s: float, num_bytes: int) -> float:
        """Returns when the last byte has left, opportunity after opportunity."""
        now_ms = math.ceil(now_s * 1000 - 1e-6)  # a ms is not missed because seconds are rounded
        if self._time_ms(self._next) < now_ms:
            self._next, self._left = self._first_from(now_ms), OPPORTUNITY_BYTES
        if num_bytes > self._left:
            rest = num_bytes - self._left
            opportunities, remainder = divmod(rest - 1, OPPORTUNITY_BYTES)
            self._next += opportunities + 1
            self._left = OPPORTUNITY_BYTES - 1 - remainder
        else:
            self._left -= num_bytes
        return max(now_s, self._time_ms(self._next) / 1000)


class Backlog:
    """Counts the bytes that have come and not left, for a drop-tail queue."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, int]] = deque()
        self._num_bytes = 0

    def num_bytes(self, now_s: float) -> int:
        """Returns the bytes that are queued at `now_s`."""
        while self._waiting and self._waiting[0][0] <= now_s:
            self._num_bytes -= self._waiting.popleft()[1]
        return self._num_bytes

    def add(self, departure_s: float, num_bytes: int) -> None:
        """Queues `num_bytes` until `departure_s`."""
        self._waiting.append((departure_s, num_bytes))
        self._num_bytes += num_bytes


def bottleneck_of(profile: LinkProfile, is_up: bool) -> Bottleneck:
    """Raises UsageError when the profile's trace cannot be read."""
    mbit, trace = (profile.up_mbit, profile.up_trace) if is_up else (profile.down_mbit, profile.down_trace)
    if trace:
        return TraceRate(load_trace(trace))
    return _FixedRate(mbit) if mbit else _Unlimited()
