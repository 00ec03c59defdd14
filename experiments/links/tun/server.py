"""Both TUN devices, and the packets between them: `PacketPath` says of each when it arrives, if it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from heapq import heappop, heappush
from typing import Any

from outrider.common.config.addresses import split_address
from outrider.experiments.links.base import kernel_facts
from outrider.experiments.links.namespaces import (
    MTU,
    Namespace,
    free_addresses,
    listen_in,
    pick_congestion_control,
    set_up_device,
)
from outrider.experiments.links.packets import PacketPath
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.proxy.server import ProxyServer
from outrider.experiments.links.tun.realisation import open_tun

_AT_ONCE = 64  # packets of one direction, before the other has its turn


class _PacketPipe:
    def __init__(self, path: PacketPath, source: int, sink: int, opened_s: float) -> None:
        self.path = path
        self.num_packets = self.num_dropped = self.num_duplicated = self.num_bytes = 0
        self.opened_s = opened_s
        self._source, self._sink = source, sink
        self._loop = asyncio.get_running_loop()
        self._held: list[tuple[float, int, bytes]] = []  # a heap: packets may overtake one another
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(source, self._read)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._source)
        os.close(self._source)

    def _read(self) -> None:
        now_s = self._loop.time() - self.opened_s
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._source, 65536)
            except BlockingIOError:
                break
            if packet[0] >> 4 != 4:  # the kernel's own IPv6 neighbour talk is no traffic of ours
                continue
            self.num_packets += 1
            arrival_s = self.path.send(now_s, len(packet))
            if arrival_s is None:
                self.num_dropped += 1
                continue
            self.num_bytes += len(packet)
            num_copies = 1 + self.path.is_duplicated()
            self.num_duplicated += num_copies - 1
            for _ in range(num_copies):
                heappush(self._held, (arrival_s + self.opened_s, self.num_packets, packet))
        if self._held and (self._timer is None or self._held[0][0] < self._timer.when()):
            self._write()

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, now_s = self._held, self._loop.time()
        while held and held[0][0] <= now_s:
            with contextlib.suppress(BlockingIOError):  # a full device drops, as a full device does
                os.write(self._sink, heappop(held)[2])
        if held:
            self._timer = self._loop.call_at(held[0][0], self._write)


class _TunServer:
    def __init__(self, up: _PacketPipe, down: _PacketPipe, relay: ProxyServer, facts: dict[str, Any]) -> None:
        self._up, self._down, self._relay, self._facts = up, down, relay, facts
        self.address = ""

    def facts(self) -> dict[str, Any]:
        return {
            **self._facts,
            "packets": {"up": self._up.num_packets, "down": self._down.num_packets},
            "packets_dropped": {"up": self._up.num_dropped, "down": self._down.num_dropped},
            "packets_duplicated": {"up": self._up.num_duplicated, "down": self._down.num_duplicated},
        }

    def wire_bytes(self) -> tuple[int, int]:
        return self._up.num_bytes, self._down.num_bytes

    def restart_outages(self) -> None:
        loop = asyncio.get_running_loop()
        for pipe in (self._up, self._down):
            pipe.path.restart_outages(loop.time() - pipe.opened_s)

    def reset(self) -> int:
        return self._relay.reset()


def _make_devices(namespace: Namespace, near: str, far: str, control: str) -> tuple[int, int]:
    device = f"orl{os.getpid()}"
    ours = open_tun(device)
    set_up_device(device, near, far, control)
    with namespace.entered():
        theirs = open_tun("orl")
        set_up_device("orl", far, near, control)
    return ours, theirs


@contextlib.asynccontextmanager
async def serve(profile: LinkProfile, upstream: str) -> AsyncIterator[_TunServer]:
    """Opens the link to `upstream` for as long as the context lasts."""
    target = split_address(upstream, "--upstream")
    near, far = free_addresses()
    control = pick_congestion_control()
    up_path, down_path = PacketPath(profile, True), PacketPath(profile, False)
    namespace = Namespace()
    ours, theirs = _make_devices(namespace, near, far, control)
    loop = asyncio.get_running_loop()
    relay = ProxyServer(LinkProfile(), target)  # the far end of the link; it adds nothing
    await relay.listen(listen_in(namespace, (far, target[1]), control))
    opened_s = loop.time()
    up = _PacketPipe(up_path, ours, theirs, opened_s)
    down = _PacketPipe(down_path, theirs, ours, opened_s)
    facts = {**kernel_facts(), "congestion_control": control, "mtu": MTU}
    server = _TunServer(up, down, relay, facts)
    server.address = f"{far}:{target[1]}"
    try:
        yield server
    finally:
        relay.close()
        up.close()
        down.close()
        namespace.close()
