"""One direction of a link as IP packets see it: queue, bottleneck, outages, losses, delay, jitter, order.

The TUN relay sends real packets through it, `virtual.py` builds virtual connections on it.
Times are seconds since the link opened.
"""

from __future__ import annotations

from outrider.experiments.links.bottleneck import Backlog, bottleneck_of
from outrider.experiments.links.chance import make_jitter, make_loss, make_random
from outrider.experiments.links.profile import LinkProfile


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
