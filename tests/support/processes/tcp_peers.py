"""Small TCP servers and clients for tests of links."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def tcp_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Runs `serve(connection)` in a thread for each connection; yields HOST:PORT."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def work(connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):
            serve(connected)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                thread = threading.Thread(target=work, args=(listener.accept()[0],))
                threads.append(thread)
                thread.start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (acceptor, *threads):
            thread.join(60)


def echo(connected: socket.socket) -> None:
    """Sends back what comes, until the other side ends."""
    while data := connected.recv(65536):
        connected.sendall(data)


def dialled(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=60)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def read_all(connected: socket.socket) -> bytes:
    """Until the end."""
    found = b""
    while data := connected.recv(65536):
        found += data
    return found


def check_echo(client: socket.socket, num_bytes: int) -> None:
    """That random bytes, sent while the answer is read, come back as they were up to the other side's end."""
    sent, got = os.urandom(num_bytes), []
    reader = threading.Thread(target=lambda: got.append(read_all(client)))
    reader.start()
    client.sendall(sent)
    client.shutdown(socket.SHUT_WR)
    reader.join(60)
    assert got == [sent]


def fastest_s(what: Callable[[], None]) -> float:
    """Of three: what a busy machine adds is not the link's."""
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin_s)
    return min(times)
