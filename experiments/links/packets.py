"""One direction of a link as IP packets see it: queue, bottleneck, outages, losses, delay, jitter, order.

The TUN relay sends real packets through it, `virtual.py` builds virtual connections on it.
Times are seconds since the link opened.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Protocol

from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.traces import OPPORTUNITY_BYTES, CapacityTrace, load_trace


class Bottleneck(Protocol):
    """Limits the rate of one direction."""

    def depart(self, now_s: float, num_bytes: int) -> float:
        """Returns the time at which the last of `num_bytes`, which come at `now_s`, has left."""

    def depart_alone(self, time_s: float, num_bytes: int) -> float:
        """Returns the same where nothing else comes, at a time that may be in the future. Takes no capacity."""


class _Unlimited:
    def depart(self, now_s: float, num_bytes: int) -> float:
        return now_s

    def depart_alone(self, time_s: float, num_bytes: int) -> float:
        return time_s


class _FixedRate:
    def __init__(self, mbit: float) -> None:
        self._byte_s = 8 / (mbit * 1e6)
        self._free_s = 0.0

    def depart(self, now_s: float, num_bytes: int) -> float:
        free_s = self._free_s
        self._free_s = (now_s if now_s > free_s else free_s) + num_bytes * self._byte_s
        return self._free_s

    def depart_alone(self, time_s: float, num_bytes: int) -> float:
        return time_s + num_bytes * self._byte_s


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
        now_ms = _whole_ms(now_s)
        if self._time_ms(self._next) < now_ms:
            self._next, self._left = self._first_from(now_ms), OPPORTUNITY_BYTES
        self._next, self._left = _taken(self._next, self._left, num_bytes)
        return max(now_s, self._time_ms(self._next) / 1000)

    def depart_alone(self, time_s: float, num_bytes: int) -> float:
        """Returns the same where nothing else comes, at a time that may be in the future. Takes no capacity."""
        last, _ = _taken(self._first_from(_whole_ms(time_s)), OPPORTUNITY_BYTES, num_bytes)
        return max(time_s, self._time_ms(last) / 1000)


def _whole_ms(time_s: float) -> int:
    return math.ceil(time_s * 1000 - 1e-6)  # a ms is not missed because seconds are rounded


def _taken(number: int, left: int, num_bytes: int) -> tuple[int, int]:
    """Returns which opportunity takes the last of `num_bytes`, and what is left of it; `left` is of the first one."""
    if num_bytes <= left:
        return number, left - num_bytes
    opportunities, remainder = divmod(num_bytes - left - 1, OPPORTUNITY_BYTES)
    return number + opportunities + 1, OPPORTUNITY_BYTES - 1 - remainder


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


# Lomax with this shape has mean scale / (shape - 1) and a finite variance, and one packet in a thousand is
# delayed 18 means.
PARETO_SHAPE = 3.0
PAUSE_S = 0.1  # ends a run of losses: what spoils a radio link passes while nobody sends


def make_random(profile: LinkProfile, is_up: bool, key: str = "") -> random.Random:
    """Returns a source of chance that is the same for the same seed, direction and key, on any machine."""
    return random.Random(f"{profile.seed}/{key}/{'up' if is_up else 'down'}")


def make_jitter(profile: LinkProfile, source: random.Random) -> Callable[[], float]:
    """Draws a packet's extra delay, s; its mean is the profile's."""
    mean_s, draw = profile.jitter_ms / 1000, source.random
    if profile.jitter_distribution == "exponential":
        return lambda: -mean_s * math.log1p(-draw())
    if profile.jitter_distribution == "pareto":
        scale_s, power = mean_s * (PARETO_SHAPE - 1), -1 / PARETO_SHAPE
        return lambda: scale_s * ((1.0 - draw()) ** power - 1.0)
    return lambda: 2 * mean_s * draw()


def make_loss(profile: LinkProfile, source: random.Random) -> Callable[[float], bool]:
    """Says of each packet, by its time, whether it is lost: alone, or in runs by Gilbert's two states.

    In the bad state every packet is lost; it is left with chance 1 / burst and entered with the chance that
    makes the share of lost packets the profile's. A packet that comes a pause after the one before it does
    not know that one's state: else a run would outlast retransmissions seconds apart.
    """
    loss, burst, draw = profile.loss, profile.loss_burst, source.random
    if burst == 1:
        return lambda time_s: draw() < loss
    enter, stay = loss / (burst * (1 - loss)), 1 - 1 / burst
    is_bad, last_s = False, -PAUSE_S

    def is_lost(time_s: float) -> bool:
        nonlocal is_bad, last_s
        chance = loss if time_s - last_s >= PAUSE_S else stay if is_bad else enter
        is_bad = draw() < chance
        last_s = max(last_s, time_s)
        return is_bad

    return is_lost


class PacketPath:
    """Decides when a packet arrives: `send` returns None for one that is lost, met a full queue, or left
    in an outage."""

    def __init__(self, profile: LinkProfile, is_up: bool, key: str = "") -> None:
        self.profile = profile
        self.delay_s = profile.rtt_ms / 2000
        self.bottleneck = bottleneck_of(profile, is_up)
        self.restart_outages(0.0)
        self.queue_bytes = profile.queue_kb * 1000
        self._backlog = Backlog()
        is_by_chance = profile.jitter_ms or profile.loss or profile.reorder or profile.duplicate
        source = make_random(profile, is_up, key) if is_by_chance else None
        self.draw_jitter = make_jitter(profile, source) if source and profile.jitter_ms else None
        self.draw_loss = make_loss(profile, source) if source and profile.loss else None
        self._source = source
        self._last_arrival_s = 0.0

    def restart_outages(self, now_s: float) -> None:
        """Lets outages count from `now_s` on."""
        self._outages = tuple((now_s + each.start_s, now_s + each.end_s) for each in self.profile.outages)

    def has_room(self, now_s: float, num_bytes: int) -> bool:
        """Returns whether the queue takes `num_bytes` more."""
        return not self.queue_bytes or self._backlog.num_bytes(now_s) + num_bytes <= self.queue_bytes

    def depart(self, now_s: float, num_bytes: int) -> float:
        """Returns when the bytes have left the bottleneck; the queue holds them until then."""
        departure_s = self.bottleneck.depart(now_s, num_bytes)
        if self.queue_bytes:
            self._backlog.add(departure_s, num_bytes)
        return departure_s

    def outage_end_s(self, time_s: float) -> float:
        """Returns the end of the outage that `time_s` is in; 0 when it is in none."""
        for start_s, end_s in self._outages:
            if start_s <= time_s < end_s:
                return end_s
        return 0.0

    def is_lost(self, departure_s: float) -> bool:
        """Returns whether a packet that leaves at `time_s` is lost, by an outage or by chance."""
        return bool(self.draw_loss and self.draw_loss(departure_s)) or self.outage_end_s(departure_s) > 0

    def travel_s(self) -> float:
        """Returns the time from the bottleneck to the far end."""
        return self.delay_s + self.draw_jitter() if self.draw_jitter else self.delay_s

    def is_duplicated(self) -> bool:
        """Returns whether a packet that was sent arrives twice."""
        share = self.profile.duplicate
        return bool(share) and self._source is not None and self._source.random() < share

    def send(self, now_s: float, num_bytes: int) -> float | None:
        """Returns when a packet sent at `now_s` arrives, or None."""
        if not self.has_room(now_s, num_bytes):
            return None
        departure_s = self.depart(now_s, num_bytes)
        if self.is_lost(departure_s):
            return None
        arrival_s = max(self._last_arrival_s, departure_s + self.travel_s())
        if self._source is not None and self.profile.reorder and self._source.random() < self.profile.reorder:
            return arrival_s + self.delay_s / 2
        self._last_arrival_s = arrival_s
        return arrival_s
