"""The daemon under uvicorn: its socket, its signals, its stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.common.config.addresses import split_address, why_unbound
from outrider.common.errors import OutriderError, UsageError
from outrider.common.process.memory import give_back
from outrider.common.process.sd_notify import Notifier
from outrider.common.process.thread_pool import start_pool
from outrider.edge_client.daemon.admission import Admission
from outrider.edge_client.daemon.http.front import OTHER
from outrider.edge_client.daemon.http.routes import make_app
from outrider.edge_client.daemon.http.wire import cut_off
from outrider.edge_client.daemon.service import Daemon

log = logging.getLogger(__name__)

# What a client may leave unread before writing to it waits: the kernel's buffer, and ours above it.
SEND_BUFFER_BYTES = 32 * 1024
HIGH_WATER_BYTES = 16 * 1024
# The event loop and the generations share the interpreter; at Python's 5 ms the loop waits too long for it.
SWITCH_INTERVAL_S = 0.0005
FREE_AFTER_IDLE_S = 2.0  # a request that follows the last one at once wants the same memory again
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's own number, of `asyncio.to_thread`
_LAST_ANSWERS_S = 3.0  # after the grace: for sessions to close at the verifier


class Protocol(H11Protocol):
    """Bounds buffers and times of a connection, and passes its transport to each request, so that a stuck
    client can be cut off.

    A connection that brings no complete head of a request within `--read-timeout-s`, or does not read its last
    answer, is cut off. uvicorn ends only those that send nothing at all after their first answer.
    """

    def __init__(self, daemon: Daemon, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._daemon = daemon
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Bounds the write buffer and starts the wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.app_state = {**self.app_state, "transport": transport, "connections": self.connections}
        self._expect_request()

    def handle_events(self) -> None:
        """Ends the wait once a request has come."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a request has come
            self._expect_nothing()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, and counts it."""
        super().send_400_response(msg)
        self._daemon.metrics.answered(OTHER, 400)

    def on_response_complete(self) -> None:
        """Starts the wait for the next request."""
        self._expect_request()
        super().on_response_complete()  # may find the next request there

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._expect_nothing()
        # uvicorn's own end of an idle connection is the politer one, so it comes first.
        wait_s = self._daemon.serve.read_timeout_s + 1.0
        self._waiting = self.loop.call_later(wait_s, cut_off, self.transport)

    def _expect_nothing(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Server(uvicorn.Server):
    """Leaves signals to `serve_until_signalled`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signal."""
        yield


def open_socket(listen: str) -> socket.socket:
    """Returns a listening socket. Raises `UsageError` where the address cannot be bound."""
    host, port = split_address(listen, "--listen", "127.0.0.1:7079")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        raise UsageError(f"--listen {listen}: cannot bind: {why_unbound(error)}") from error
    found.setblocking(False)
    return found


def run_until_signalled(daemon: Daemon, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or SIGINT, with the objects that exist now left out of garbage collection."""
    gc.collect()
    gc.freeze()  # what loading left lives as long as the process
    try:
        asyncio.run(serve_until_signalled(daemon, listener, on_ready))
    finally:
        gc.unfreeze()


async def serve_until_signalled(
    daemon: Daemon, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serves until SIGTERM or SIGINT. Then nothing new is taken, running requests get `--stop-grace-s`, and
    after that their sessions are cancelled; a second signal ends the grace. SIGHUP reloads the
    configuration."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(start_pool(NUM_THREADS, "work"))  # closed with the loop
    first, second = asyncio.Event(), asyncio.Event()

    def on_stop() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, reload, daemon)
    server = Server(_uvicorn_config(daemon))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    notifier = Notifier()
    if server.started:
        on_ready()
        notifier.ready()
    stopping = asyncio.create_task(first.wait())
    freeing = asyncio.create_task(give_back_when_idle(daemon.admission))
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    freeing.cancel()
    notifier.stopping()
    await _stop(daemon, server, second)
    await serving
    stopping.cancel()


async def give_back_when_idle(admission: Admission, idle_s: float = FREE_AFTER_IDLE_S) -> None:
    """Gives the memory of finished requests back to the operating system, `idle_s` after the last of them ended."""
    while True:
        await admission.busy()
        await admission.idle()
        await asyncio.sleep(idle_s)
        if not admission.num_running:
            await asyncio.to_thread(give_back)


def reload(daemon: Daemon) -> None:
    """Reloads the configuration; an invalid one is logged and changes nothing."""
    try:
        held_back = daemon.reload()
    except OutriderError as error:
        log.error("the configuration is not reloaded: %s", error)
        return
    log.info("configuration reloaded", extra={"needs_restart": ",".join(held_back) or "nothing"})


async def _stop(daemon: Daemon, server: Server, hurry: asyncio.Event) -> None:
    grace_s = daemon.serve.stop_grace_s
    log.info("stopping", extra={"running": daemon.admission.num_running, "grace_s": grace_s})
    daemon.admission.stop()
    server.config.timeout_graceful_shutdown = int(grace_s + _LAST_ANSWERS_S) + 2  # ours ends before
    server.should_exit = True  # the listening socket is closed, idle connections too
    waits = [asyncio.create_task(daemon.admission.idle()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if num_cancelled := daemon.activity.cancel_all():
        log.warning("the grace is over", extra={"cancelled": num_cancelled})
        await asyncio.wait(waits[:1], timeout=_LAST_ANSWERS_S)
    for task in waits:
        task.cancel()
    for connection in list(server.server_state.connections):
        if connection.transport is not None and connection.transport.get_write_buffer_size():
            cut_off(connection.transport)


def _uvicorn_config(daemon: Daemon) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(daemon),
        http=functools.partial(Protocol, daemon),  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",  # a warning for each request that is none would be a flood
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(max(1, daemon.serve.read_timeout_s)),
    )
