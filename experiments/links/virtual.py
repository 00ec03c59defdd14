"""A link in virtual time: when a message that a TCP connection carries is at the far end, whole and in order.

    link = VirtualLink(profile, key="edge 17")
    arrival_s = link.up.deliver(now_s, num_bytes)

No socket and no clock: times are the caller's, in seconds since the link opened, and never go back. A
message is cut into segments as TCP would (1,448 bytes of it after 52 of headers), which pass the bottleneck
one after the other. What TCP would send again comes later, by these rules, after Linux:

- RTO = RTT + 200 ms, or + 4 jitters where that is more. What was sent again and lost again waits the RTO,
  then twice that, and so on.
- A lost segment with others of its message after it is sent again when the far end reports those: after one
  RTT, 1.25 when fewer than three came (RACK, RFC 8985).
- The last of several is probed for after 2 RTT (tail loss probe, the same RFC), a message of one segment
  after an RTO.
- What is sent before a retransmission passes an outage waits until that one is acknowledged: until then the
  congestion window is one segment. A fresh connection (`connect`) does not wait, nor does what is held take
  capacity from it: it then leaves as if nothing else came.
- A message that meets a full queue takes its turn in the bottleneck, as the sender holds it back, and arrives
  one RTT late. Retransmissions take no capacity.

There is no congestion window: messages past the initial one (14,480 bytes) arrive earlier than on a real
link, and so do those of several segments after a loss.
"""

from __future__ import annotations

from typing import Protocol

from outrider.experiments.links.packets import PacketPath
from outrider.experiments.links.profile import LinkProfile

SEGMENT_BYTES = 1448  # 1,500 less IPv4, TCP, and TCP's timestamps
HEADER_BYTES = 52
MIN_RTO_S = 0.2
MAX_RTO_S = 120.0
SYN_RETRIES_S = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # net.ipv4.tcp_syn_linear_timeouts = 4


def wire_bytes(num_bytes: int) -> int:
    """Returns the bytes of the IP packets that carry a message of `num_bytes`."""
    return num_bytes + HEADER_BYTES * -(-num_bytes // SEGMENT_BYTES)


class Flow(Protocol):
    """Carries one direction of a connection."""

    def deliver(self, now_s: float, num_bytes: int) -> float:
        """Returns when the last byte of a message sent at `now_s` is at the far end, after all sent
        before."""


class _PlainFlow:
    __slots__ = ("_delay_s", "_depart", "_last_s")

    def __init__(self, path: PacketPath) -> None:
        self._delay_s = path.delay_s
        self._depart = path.bottleneck.depart
        self._last_s = 0.0

    def deliver(self, now_s: float, num_bytes: int) -> float:
        wire = num_bytes + HEADER_BYTES * -(-num_bytes // SEGMENT_BYTES)
        arrival_s = self._depart(now_s, wire) + self._delay_s
        if arrival_s > self._last_s:
            self._last_s = arrival_s
        return self._last_s


class _TcpFlow:
    def __init__(self, path: PacketPath) -> None:
        self._path = path
        jitter_s = path.profile.jitter_ms / 1000
        self.rtt_s = 2 * (path.delay_s + jitter_s)
        self.rto_s = self.rtt_s + max(MIN_RTO_S, 4 * jitter_s)
        self._last_s = 0.0
        self._held_until_s = 0.0  # nothing new leaves before: a retransmission has not been acknowledged

    def deliver(self, now_s: float, num_bytes: int) -> float:
        path, start_s = self._path, max(now_s, self._held_until_s)
        full, rest = divmod(num_bytes, SEGMENT_BYTES)
        num_segments = full + bool(rest)
        is_held = start_s > now_s
        has_room = is_held or path.has_room(now_s, HEADER_BYTES + min(num_bytes, SEGMENT_BYTES))
        late_s = 0.0 if has_room else self.rtt_s
        for number in range(1, num_segments + 1):
            payload = SEGMENT_BYTES if number <= full else rest
            if is_held:
                departure_s = path.bottleneck.depart_alone(self._held_until_s, HEADER_BYTES + payload)
                self._held_until_s = departure_s
            else:
                departure_s = path.depart(now_s, HEADER_BYTES + payload)
            if path.is_lost(departure_s):
                arrival_s = self._resend(departure_s, num_segments - number, is_alone=num_segments == 1)
            else:
                arrival_s = departure_s + path.travel_s()
            self._last_s = max(self._last_s, arrival_s + late_s)
        self._last_s = max(self._last_s, start_s)
        return self._last_s

    def _resend(self, departure_s: float, num_behind: int, is_alone: bool) -> float:
        """Returns when a segment lost at `departure_s` arrives."""
        if num_behind:
            wait_s = self.rtt_s * (1.0 if num_behind >= 3 else 1.25)
        else:
            wait_s = self.rto_s if is_alone else min(2 * self.rtt_s, self.rto_s)
        retry_s, rto_s = departure_s + wait_s, self.rto_s
        is_outage = self._path.outage_end_s(departure_s) > 0
        while self._path.is_lost(retry_s):
            is_outage = is_outage or self._path.outage_end_s(retry_s) > 0
            retry_s += rto_s
            rto_s = min(2 * rto_s, MAX_RTO_S)
        if is_outage:
            self._held_until_s = max(self._held_until_s, retry_s + self.rtt_s)
        return retry_s + self._path.travel_s()


class VirtualLink:
    """Holds both directions of one connection over a link; `key` gives links of one profile chances of
    their own."""

    __slots__ = ("down", "paths", "profile", "up")

    up: Flow
    down: Flow

    def __init__(self, profile: LinkProfile, key: str = "", *, beside: VirtualLink | None = None) -> None:
        """`beside`: another connection over the same link shares its bottlenecks, queues and losses.

        Raises UsageError when the profile's capacity traces cannot be read.
        """
        self.profile = profile
        self.paths: tuple[PacketPath, PacketPath] = (
            beside.paths if beside else (PacketPath(profile, True, key), PacketPath(profile, False, key))
        )
        self._open()

    def _open(self) -> None:
        link = self.profile
        kind = _TcpFlow if link.jitter_ms or link.loss or link.outages or link.queue_kb else _PlainFlow
        self.up, self.down = (kind(path) for path in self.paths)

    def connect(self, now_s: float) -> float:
        """Forgets the connection and opens a new one; returns when the edge can send on it.

        A handshake that an outage or chance swallows is tried again after 1, 1, 1, 1, 1, 2, 4, ... seconds.
        """
        self._open()
        up, down = self.paths
        retries = iter(SYN_RETRIES_S)
        while up.is_lost(now_s) or down.is_lost(now_s + up.delay_s):
            now_s += next(retries, SYN_RETRIES_S[-1])
        return now_s + up.travel_s() + down.travel_s()
