"""Connections in virtual time: the edge's `VerifierLink` over a `VirtualLink`, a stream at its far end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from queue import Empty
from typing import TYPE_CHECKING

from outrider.common import codec
from outrider.common.errors import LinkError
from outrider.common.types import ModelInfo, SessionRequest, SessionResponse, Verdict, VerifyRequest
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.link.stream import FRAME_BYTES
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.virtual import VirtualLink
from outrider.experiments.simulator.parts.times import EdgeTimes
from outrider.experiments.simulator.world.world import VirtualQueue, World

if TYPE_CHECKING:
    from outrider.experiments.simulator.parts.verifier import SimulatedVerifier

_requests: dict[tuple[int, ...], int] = {}
_verdicts: dict[tuple[object, ...], int] = {}


def request_bytes(request: SessionRequest) -> int:
    """Returns the size of the message as protobuf."""
    if not isinstance(request, VerifyRequest) or request.q_support or request.parents:
        return int(codec.encode_request(request).ByteSize())
    shape = (
        len(request.draft_tokens),
        len(request.committed_tokens),
        len(request.q_token_probs),
        len(request.hard_mask),
        _varint(request.round_id),
        _varint(request.base_position),
        _varint(request.deadline_ms),
        request.candidates_from,
        request.pipelined,
    )
    found = _requests.get(shape)
    if found is None:
        found = _requests[shape] = codec.encode_request(request).ByteSize()
    return found


def response_bytes(response: SessionResponse, kind: type[SessionRequest] | None) -> int:
    """Returns the size of an answer to a request of `kind`."""
    if (
        not isinstance(response, Verdict)
        or response.candidates
        or response.logprobs
        or response.accepted_nodes
    ):
        return int(codec.encode_response(response, kind).ByteSize())
    metrics = response.metrics
    shape = (
        _varint(response.round_id),
        _varint(response.accepted_len),
        _varint(response.position),
        response.correction_kind,
        _varint(metrics.queue_ns),
        _varint(metrics.forward_ns),
        _varint(metrics.total_ns),
        _varint(metrics.batch_size),
        _varint(metrics.step_token_ns),
        _varint(metrics.num_active_sessions),
        metrics.la_over_k == 0,  # zeros are not sent
        metrics.alpha_mean == 0,
    )
    found = _verdicts.get(shape)
    if found is None:
        found = _verdicts[shape] = codec.encode_response(response, kind).ByteSize()
    return found


def _varint(value: int) -> int:
    """Returns its bytes; 0 for a zero, which is not sent."""
    return (value.bit_length() + 6) // 7


DATA_FRAME_BYTES = 9  # HTTP/2's header of each message
SETTINGS_BYTES = 64  # what both ends say before gRPC calls a connection ready, about
DESCRIPTION_BYTES = 400  # what a verifier says of itself, about
BALANCES = ("session", "edge")


@dataclass(eq=False)
class Site:
    """Holds where one edge is: its access link, which all its connections share, and the verifiers it may
    ask."""

    number: int
    profile: LinkProfile
    times: EdgeTimes
    verifiers: list[SimulatedVerifier | None]  # None: one that only other edges ask
    balance: str = "session"  # of BALANCES
    link: VirtualLink = field(init=False)

    def __post_init__(self) -> None:
        self.link = VirtualLink(self.profile, key=str(self.number))

    def verifier_for(self, session_id: bytes) -> SimulatedVerifier:
        """Returns a verifier by the session's id, as a balancer routes by its header; or the edge's own."""
        number = self.number
        if self.balance == "session":
            number = int.from_bytes(blake2b(session_id, digest_size=8).digest(), "little")
        verifier = self.verifiers[number % len(self.verifiers)]
        assert verifier is not None, "an edge of another part of the system"
        return verifier


class Network:
    """Finds the edges' sites by the address that each calls the cloud."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sites: dict[str, Site] = {}

    def add(self, site: Site) -> str:
        """Returns the site's address, one of this machine, so that no edge looks for certificates."""
        high, low = divmod(site.number, 1 << 8)
        address = f"127.{1 + (high >> 8)}.{high & 0xFF}.{low}:7077"
        self._sites[address] = site
        return address

    def create_link(self, config: RunConfig, session_id: bytes) -> _SimulatedLink:
        """Returns a link to the verifier that the configuration names."""
        return _SimulatedLink(self._world, self._sites[config.verifier], config.verifier, session_id)


class _SimulatedLink:
    def __init__(self, world: World, site: Site, address: str, session_id: bytes) -> None:
        self.address = address
        self.traffic = Traffic()
        self._world, self._site, self._session_id = world, site, session_id
        self._verifier = site.verifier_for(session_id)

    def connect(self, timeout_s: float) -> _SimulatedConnection:
        world, site = self._world, self._site
        link = VirtualLink(site.profile, beside=site.link)
        end_s = world.now_s + timeout_s

        def wait_until(at_s: float) -> None:
            world.sleep(min(at_s, end_s) - world.now_s)
            if at_s > end_s:
                raise LinkError(
                    f"cannot connect to a verifier at {self.address}: no answer in {timeout_s:.1f} s"
                )

        wait_until(link.connect(world.now_s + site.times.connect_ms / 1e3))
        # Each goes when its time has come: what other connections send meanwhile passes the bottleneck before it.
        for flow in (link.up, link.down):
            wait_until(flow.deliver(world.now_s, SETTINGS_BYTES))
        return _SimulatedConnection(world, link, site.times, self.traffic, self._verifier, self._session_id)

    def describe(self, timeout_s: float) -> ModelInfo:
        return self._verifier.engine.model


class _SimulatedConnection:
    """Carries messages as they are; they count as long as the codec makes them."""

    def __init__(
        self,
        world: World,
        link: VirtualLink,
        times: EdgeTimes,
        traffic: Traffic,
        verifier: SimulatedVerifier,
        session_id: bytes,
    ) -> None:
        self._world, self._link, self._traffic = world, link, traffic
        self._send_s, self._receive_s = times.send_ms / 1e3, times.receive_ms / 1e3
        self._inbox = VirtualQueue(world)
        self._is_closed = False
        self.queued_s = 0.0
        self._trip_s: float | None = None
        self._stream = verifier.open_stream(session_id, self._deliver)
        self._far_receive_s, self._far_send_s = verifier.receive_s, verifier.send_s

    def send(self, request: SessionRequest) -> None:
        num_bytes = request_bytes(request) + FRAME_BYTES
        self._traffic.bytes_up += num_bytes
        self._to_verifier(num_bytes, lambda: self._stream.take(request))

    def _to_verifier(self, num_bytes: int, function: Callable[[], object]) -> None:
        sent_s = self._world.now_s + self._send_s
        arrival_s = self._link.up.deliver(sent_s, num_bytes + DATA_FRAME_BYTES)
        self._world.call_at(arrival_s + self._far_receive_s, function)

    def _deliver(self, response: SessionResponse, kind: type[SessionRequest] | None) -> None:
        if self._is_closed:
            return
        num_bytes = response_bytes(response, kind) + FRAME_BYTES
        sent_s = self._world.now_s + self._far_send_s
        arrival_s = self._link.down.deliver(sent_s, num_bytes + DATA_FRAME_BYTES)
        here_s = arrival_s + self._receive_s
        self._world.call_at(here_s, self._inbox.put, (response, num_bytes, here_s))

    def receive(self, timeout_s: float) -> SessionResponse | None:
        try:
            item: tuple[SessionResponse, int, float] | None = self._inbox.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if item is None:
            return None
        response, num_bytes, here_s = item
        self._traffic.bytes_down += num_bytes
        self.queued_s = self._world.now_s - here_s
        return response

    def start_rtt_probe(self) -> None:
        """Sends a `Describe`: the verifier's event loop answers it, whatever the engine does."""
        start_s = self._world.now_s

        def answer() -> None:
            sent_s = self._world.now_s + self._far_send_s
            arrival_s = self._link.down.deliver(sent_s, DESCRIPTION_BYTES) + self._receive_s
            self._world.call_at(arrival_s, self._end_trip, arrival_s - start_s)

        self._to_verifier(0, answer)

    def _end_trip(self, trip_s: float) -> None:
        self._trip_s = trip_s

    def take_rtt(self) -> float | None:
        trip_s, self._trip_s = self._trip_s, None
        return trip_s

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._to_verifier(0, self._stream.detach)
