"""The proxy itself: accepts on loopback, dials upstream, and joins the two by a pipe each way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.common.config.addresses import split_address
from outrider.experiments.links.base import kernel_facts
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.proxy.pipe import Pipe, reset
from outrider.experiments.links.virtual import VirtualLink


class _Side(asyncio.Protocol):
    """Is one of a connection's two sockets: what it reads goes into `outgoing`, `incoming` writes to it."""

    def __init__(self, outgoing: Pipe, incoming: Pipe, transports: set[asyncio.Transport]) -> None:
        self._outgoing, self._incoming, self._transports = outgoing, incoming, transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        self._transports.add(transport)
        self._outgoing.source = self._incoming.sink = transport
        self._incoming.release()

    def data_received(self, data: bytes) -> None:
        self._outgoing.put(data)

    def pause_writing(self) -> None:
        self._incoming.is_sink_full = True

    def resume_writing(self) -> None:
        self._incoming.is_sink_full = False
        self._incoming.release()

    def eof_received(self) -> bool:
        self._outgoing.end()
        return True  # the other direction may go on

    def connection_lost(self, error: Exception | None) -> None:
        self._transports.discard(self._transport)
        if error is not None:
            self._outgoing.break_off()


class ProxyServer:
    """Relays connections that share the two bottlenecks of one link."""

    def __init__(self, profile: LinkProfile, upstream: tuple[str, int]) -> None:
        self.transports: set[asyncio.Transport] = set()
        self.address = ""
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._link = VirtualLink(profile)
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._pipes: list[tuple[Pipe, Pipe]] = []
        self._dialling: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        """Returns the seconds since the link opened."""
        return self._loop.time() - self._opened_s

    def call_at(self, time_s: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls `what` at a time of `now_s`."""
        return self._loop.call_at(self._opened_s + time_s, what)

    def accept(self) -> _Side:
        """Takes a connection. The client has its handshake from loopback already: its first bytes wait as
        long as a real one."""
        connection = VirtualLink(self._link.profile, beside=self._link)
        ready_s = connection.connect(self.now_s())
        up_path, down_path = connection.paths
        up = Pipe(self, up_path, connection.up, ready_s)
        down = Pipe(self, down_path, connection.down, ready_s)
        up.opposite, down.opposite = down, up
        self._pipes.append((up, down))
        task = self._loop.create_task(self._dial(up, down, ready_s + up_path.delay_s))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return _Side(up, down, self.transports)

    async def _dial(self, up: Pipe, down: Pipe, at_s: float) -> None:
        await asyncio.sleep(at_s - self.now_s())
        try:
            await self._loop.create_connection(lambda: _Side(down, up, self.transports), *self._upstream)
        except OSError:
            down.break_off()

    def facts(self) -> dict[str, Any]:
        """Returns the kernel, and what TCP does and does not see on this link."""
        kernel = kernel_facts()
        return {
            "kernel": kernel["kernel"],
            "congestion_control": f"none on the link, {kernel['congestion_control']} on loopback",
            "loss": "a delay, by the rules of experiments/links/virtual.py",
            "slow_start": "none",
        }

    def wire_bytes(self) -> tuple[int, int]:
        """Returns the bytes up and down with headers as TCP would add them; no acknowledgements, no
        retransmissions."""
        return sum(up.num_wire_bytes for up, _ in self._pipes), sum(d.num_wire_bytes for _, d in self._pipes)

    def restart_outages(self) -> None:
        """Lets outages count from now on."""
        for path in self._link.paths:
            path.restart_outages(self.now_s())

    async def listen(self, listener: socket.socket) -> None:
        """Serves what connects to `listener`, in whatever network namespace that was made."""
        self._server = await self._loop.create_server(self.accept, sock=listener)

    def close(self) -> None:
        """Stops listening and aborts every connection."""
        if self._server is not None:
            self._server.close()
        for transport in list(self.transports):
            transport.abort()

    def reset(self) -> int:
        """Resets every connection; returns how many there were."""
        num_connections = sum(up.source in self.transports for up, _ in self._pipes)
        for transport in list(self.transports):
            reset(transport)
        return num_connections


@contextlib.asynccontextmanager
async def serve(profile: LinkProfile, upstream: str) -> AsyncIterator[ProxyServer]:
    """Opens the link to `upstream` for as long as the context lasts."""
    proxy = ProxyServer(profile, split_address(upstream, "--upstream"))
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.address = f"127.0.0.1:{listener.getsockname()[1]}"
    await proxy.listen(listener)
    try:
        yield proxy
    finally:
        proxy.close()
