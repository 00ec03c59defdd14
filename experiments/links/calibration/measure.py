"""Measures whether the realisations do what a profile says, and the same as one another.

A point is one figure of one realisation: the median round trip of small frames, alone, through a bottleneck
or under jitter, or the throughput, against what the profile makes it. Small frames must come within
max(1 ms, 5 %), throughput within 5 %. The simulated link is measured as the others are, in its own time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from outrider.experiments.links.base import create_realisation, kernel_facts
from outrider.experiments.links.calibration.echo import echo_server, round_trips_ms, throughput_mbit
from outrider.experiments.links.priority import real_time
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.virtual import HEADER_BYTES, SEGMENT_BYTES, VirtualLink, wire_bytes

RTTS_MS = (10.0, 40.0, 100.0)
FRAMES = (200, 8000)  # bytes
RATE_MBIT = 20.0
JITTER_MS = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """Holds one figure of one realisation, beside its nominal value."""

    realisation: str
    what: str  # "rtt", "rtt at 20 Mbit/s", "rtt with jitter", "throughput"
    rtt_ms: float
    frame_bytes: int
    nominal: float
    measured: float
    low: float  # 5th percentile; of a throughput: itself
    high: float  # 95th
    tolerance: float
    unit: str

    @property
    def share(self) -> float:
        """Returns deviation : tolerance; at most 1 is wanted."""
        return abs(self.measured - self.nominal) / self.tolerance

    def __str__(self) -> str:
        text = f"{self.realisation:<10}{self.what:<18}{self.rtt_ms:>5.0f} ms  {self.frame_bytes:>6,} B  "
        text += f"{self.measured:8.2f} {self.unit:<7} nominal {self.nominal:8.2f}  "
        return f"{text}p5-p95 {self.low:.2f}-{self.high:.2f}  {self.share:4.2f} of the tolerance"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Holds every point, and what is known of the realisations."""

    points: list[Point]
    facts: dict[str, dict[str, Any]]  # by realisation: congestion control, kernel, ...
    refused: dict[str, list[str]]  # by realisation: why it was not measured

    @property
    def worst(self) -> Point:
        """Returns the point with the largest share of its tolerance."""
        return max(self.points, key=lambda point: point.share)

    @property
    def worst_pair(self) -> tuple[float, str]:
        """Returns the largest difference of two realisations at one point, as a share of the tolerance,
        and which."""
        found = [(0.0, "only one realisation was measured")]
        for one, two in combinations(self.points, 2):
            if one.realisation != two.realisation and _place(one) == _place(two):
                share = abs(one.measured - two.measured) / one.tolerance
                label = f"{one.realisation} and {two.realisation}, {one.what} at {one.rtt_ms:g} ms"
                found.append((share, f"{label}, {one.frame_bytes:,} B"))
        return max(found)

    @property
    def worst_share(self) -> float:
        """Returns the larger of `worst` and `worst_pair`."""
        return max(self.worst.share, self.worst_pair[0])

    def record(self) -> dict[str, Any]:
        """Returns the calibration as JSON has it."""
        points = [{**asdict(point), "share": round(point.share, 4)} for point in self.points]
        return {
            "worst_share": round(self.worst_share, 4),
            "worst_point": str(self.worst),
            "worst_pair": self.worst_pair[1],
            "facts": self.facts,
            "refused": self.refused,
            "points": points,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured of each realisation."""

    rtts_ms: Sequence[float] = RTTS_MS
    num_trips: int = 40
    has_jitter: bool = True
    throughput_s: float = 4.0  # 0: not measured


SHORT = Plan(num_trips=12, has_jitter=False, throughput_s=0.0)


def calibrate(
    names: Sequence[str], plan: Plan, on_point: Callable[[Point], None] = lambda point: None
) -> Calibration:
    """Measures each realisation that works here. Raises UsageError for an unknown name."""
    found = Calibration([], {}, {})
    for name in names:
        realisation = create_realisation(name)
        if refusals := realisation.refusals(LinkProfile(rtt_ms=1, up_mbit=RATE_MBIT)):
            found.refused[name] = refusals
            continue
        measure = _measure_simulated if name == "simulated" else _measure_real
        for rtt_ms in plan.rtts_ms:
            with real_time():  # it is the link that is measured, not how busy the machine is
                measured = measure(name, rtt_ms, plan)
            for point, facts in measured:
                found.points.append(point)
                found.facts.setdefault(name, {}).update(facts)
                on_point(point)
    return found


def short_calibration(name: str, rtts_ms: Sequence[float] = RTTS_MS) -> dict[str, Any]:
    """Measures one realisation for a few seconds, to go with a result: worst share, points, kernel,
    congestion control. Raises UsageError when the realisation is unknown."""
    return calibrate([name], Plan(rtts_ms, SHORT.num_trips, SHORT.has_jitter, SHORT.throughput_s)).record()


def num_points(plan: Plan) -> int:
    """Returns the number of points of one realisation."""
    return len(plan.rtts_ms) * (len(FRAMES) + 1 + plan.has_jitter + (plan.throughput_s > 0))


def _place(point: Point) -> tuple[str, float, int]:
    return point.what, point.rtt_ms, point.frame_bytes


def _profiles(rtt_ms: float, plan: Plan) -> list[tuple[str, LinkProfile, tuple[int, ...], int]]:
    """Returns what is measured, the link, the frames and how many. Uniform jitter leaves the median at
    twice its mean."""
    limited = LinkProfile(rtt_ms=rtt_ms, up_mbit=RATE_MBIT, down_mbit=RATE_MBIT)
    found = [
        ("rtt", LinkProfile(rtt_ms=rtt_ms), FRAMES, plan.num_trips),
        (f"rtt at {RATE_MBIT:g} Mbit/s", limited, FRAMES[-1:], plan.num_trips),
    ]
    if plan.has_jitter:
        jittered = LinkProfile(rtt_ms=rtt_ms, jitter_ms=JITTER_MS)
        num_trips = max(plan.num_trips, round(4000 / rtt_ms))  # a smaller tolerance needs more of them
        found.append(("rtt with jitter", jittered, FRAMES[:1], num_trips))
    return found


def _measure_real(name: str, rtt_ms: float, plan: Plan) -> list[tuple[Point, dict[str, Any]]]:
    realisation, found = create_realisation(name), []
    with echo_server() as upstream:
        for what, profile, frames, num_trips in _profiles(rtt_ms, plan):
            with realisation.open(profile, upstream) as link:
                for num_bytes in frames:
                    times_ms, control = round_trips_ms(link.address, num_bytes, num_trips)
                    facts = {**link.facts(), "client_congestion_control": control}
                    facts.pop("packets", None)
                    found.append((_round_trip_point(name, what, profile, num_bytes, times_ms), facts))
        if plan.throughput_s:
            profile = LinkProfile(rtt_ms=rtt_ms, up_mbit=RATE_MBIT)
            with realisation.open(profile, upstream) as link:
                mbit = throughput_mbit(link.address, plan.throughput_s, plan.throughput_s / 2)
                found.append((_throughput_point(name, rtt_ms, mbit), {}))
    return found


def _measure_simulated(name: str, rtt_ms: float, plan: Plan) -> list[tuple[Point, dict[str, Any]]]:
    found = []
    for what, profile, frames, num_trips in _profiles(rtt_ms, plan):
        for num_bytes in frames:
            link, now_s, times_ms = VirtualLink(profile), 0.0, []
            for _ in range(num_trips):
                back_s = link.down.deliver(link.up.deliver(now_s, num_bytes), num_bytes)
                times_ms.append((back_s - now_s) * 1000)
                now_s = back_s
            found.append(_round_trip_point(name, what, profile, num_bytes, times_ms))
    if plan.throughput_s:
        up, num_frames = VirtualLink(LinkProfile(rtt_ms=rtt_ms, up_mbit=RATE_MBIT)).up, 1000
        first_s = up.deliver(0.0, SEGMENT_BYTES)
        last_s = [up.deliver(0.0, SEGMENT_BYTES) for _ in range(num_frames)][-1]
        mbit = num_frames * SEGMENT_BYTES * 8e-6 / (last_s - first_s)
        found.append(_throughput_point(name, rtt_ms, mbit))
    return [(point, {"realisation": name, "kernel": kernel_facts()["kernel"]}) for point in found]


def _round_trip_point(
    name: str, what: str, profile: LinkProfile, num_bytes: int, times_ms: list[float]
) -> Point:
    nominal = profile.rtt_ms + 2 * profile.jitter_ms
    if profile.up_mbit:
        nominal += 2 * wire_bytes(num_bytes) * 8 / (profile.up_mbit * 1000)
    ordered = sorted(times_ms)
    middle = statistics.median(times_ms)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    tolerance = max(1.0, 0.05 * nominal)
    return Point(name, what, profile.rtt_ms, num_bytes, nominal, middle, low, high, tolerance, "ms")


def _throughput_point(name: str, rtt_ms: float, mbit: float) -> Point:
    nominal = RATE_MBIT * SEGMENT_BYTES / (SEGMENT_BYTES + HEADER_BYTES)
    return Point(name, "throughput", rtt_ms, 16384, nominal, mbit, mbit, mbit, 0.05 * nominal, "Mbit/s")
