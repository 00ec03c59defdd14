"""Describes a link. One description serves all four realisations; every profile that exists is valid."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from outrider.common.errors import UsageError

JITTERS = ("uniform", "exponential", "pareto")


@dataclass(frozen=True, slots=True)
class Outage:
    """Describes a time in which nothing passes: from `start_s` for `duration_s` after the link opened."""

    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """Returns when the outage is over."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Raises UsageError naming the field when a value makes no sense."""

    name: str = "loopback"
    rtt_ms: float = 0.0  # propagation, half each way
    jitter_ms: float = 0.0  # mean extra delay of a packet, each way; packets keep their order ...
    reorder: float = 0.0  # ... but for this share, which others overtake: a quarter of the RTT late
    duplicate: float = 0.0  # share of packets that arrive twice
    jitter_distribution: str = "uniform"  # of JITTERS
    loss: float = 0.0  # share of packets lost, each way
    loss_burst: float = 1.0  # mean length of a run of losses, packets; 1: independent
    up_mbit: float = 0.0  # edge -> cloud, IP packets with their headers; 0: not limited
    down_mbit: float = 0.0
    queue_kb: float = 0.0  # drop-tail queue before each bottleneck, 1,000 bytes; 0: not bounded
    outages: tuple[Outage, ...] = ()
    up_trace: str = ""  # file: one delivery opportunity (ms, 1,500 bytes) a line, repeated for ever
    down_trace: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms", "up_mbit", "down_mbit", "queue_kb"):
            self._require(name, _is_number(getattr(self, name)) and getattr(self, name) >= 0, "at least 0")
        self._require("name", isinstance(self.name, str) and bool(self.name.strip()), "a name")
        is_room = _is_number(self.queue_kb) and (self.queue_kb == 0 or self.queue_kb >= 1.5)
        self._require("queue_kb", is_room, "0 for no bound, or at least a packet, 1.5")
        is_known = self.jitter_distribution in JITTERS
        self._require("jitter_distribution", is_known, "one of " + ", ".join(JITTERS))
        for name in ("reorder", "duplicate", "loss"):
            share = getattr(self, name)
            self._require(name, _is_number(share) and 0 <= share < 1, "at least 0 and below 1")
        self._require("loss_burst", _is_number(self.loss_burst) and self.loss_burst >= 1, "at least 1")
        # A run starts with chance p after a packet that passed; p <= 1 asks for loss <= burst / (burst + 1).
        least = 1.0 if self.loss_burst == 1 else self.loss / (1 - self.loss)
        self._require("loss_burst", self.loss_burst >= least, f"at least loss / (1 - loss), {least:g}")
        self._require("seed", isinstance(self.seed, int) and self.seed >= 0, "an integer of at least 0")
        for name, rate in (("up_trace", self.up_mbit), ("down_trace", self.down_mbit)):
            self._require(name, isinstance(getattr(self, name), str), "a file's path")
            other = name.replace("trace", "mbit")
            self._require(name, not (getattr(self, name) and rate), f"empty where {other} is given")
        self._check_outages()

    def _check_outages(self) -> None:
        end_s = 0.0
        for outage in self.outages:
            is_fine = _is_number(outage.start_s) and _is_number(outage.duration_s) and outage.duration_s > 0
            self._require("outages", is_fine, "start_s and a duration_s above 0 for each")
            self._require("outages", outage.start_s >= end_s, "in order, from 0 s on, apart from one another")
            end_s = outage.end_s

    def _require(self, name: str, is_met: bool, wanted: str) -> None:
        if not is_met:
            value = getattr(self, name)
            raise UsageError(f"link profile {self.name!r}: {name} is {value!r}; give {wanted}")

    @property
    def is_plain(self) -> bool:
        """Returns whether the link is a constant delay and nothing else."""
        limits = (self.up_mbit, self.down_mbit, self.up_trace, self.down_trace)
        by_packet = (self.jitter_ms, self.reorder, self.duplicate, self.loss)
        return not any((*by_packet, self.outages, *limits))

    def with_changes(self, **changes: object) -> LinkProfile:
        """Returns a copy with other values. Raises UsageError for a field that is not one."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                known_names = ", ".join(sorted(known))
                raise UsageError(f"link profile {self.name!r}: unknown field {name}; known: {known_names}")
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
