"""The two ends of a calibration: a server that echoes frames or counts bytes, a client that times them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from outrider.common.errors import LinkError

_COUNT = 0  # a connection begins with four bytes: the size of the frames to echo, or this: count what comes
_WARM_UP = 3  # round trips before the first that counts: routes, windows, delayed acknowledgements


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Serves on loopback; yields HOST:PORT."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_accept, args=(listener,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connected, _ = listener.accept()
            threading.Thread(target=_serve, args=(connected,), daemon=True).start()


def _serve(connected: socket.socket) -> None:
    with connected, contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        num_bytes = int.from_bytes(connected.recv(4, socket.MSG_WAITALL), "big")
        if num_bytes == _COUNT:
            while data := connected.recv(65536):
                connected.sendall(len(data).to_bytes(4, "big"))
        while frame := connected.recv(num_bytes, socket.MSG_WAITALL):  # whole, as a message is answered
            connected.sendall(frame)


def _dial(address: str, num_bytes: int) -> socket.socket:
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=60)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.sendall(num_bytes.to_bytes(4, "big"))
    return connected


def round_trips_ms(address: str, num_bytes: int, num_trips: int) -> tuple[list[float], str]:
    """Times of frames of `num_bytes` there and back, one after the other; and the congestion control."""
    frame, times_ms = bytes(num_bytes), []
    with _dial(address, num_bytes) as connected:
        for _ in range(num_trips + _WARM_UP):
            begin_s = time.perf_counter()
            connected.sendall(frame)
            num_missing = num_bytes
            while num_missing:
                data = connected.recv(num_missing)
                if not data:
                    raise LinkError(f"the link at {address} broke during its calibration")
                num_missing -= len(data)
            times_ms.append((time.perf_counter() - begin_s) * 1000)
        control = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return times_ms[_WARM_UP:], control


def throughput_mbit(address: str, seconds: float, skip_s: float) -> float:
    """Sends without a pause until `seconds`; returns the Mbit/s that arrived from `skip_s` on."""
    end_s = time.perf_counter() + seconds
    counted: list[tuple[float, int]] = []
    with _dial(address, _COUNT) as connected:
        reader = threading.Thread(target=_count, args=(connected, counted))
        reader.start()
        block = bytes(16384)
        with contextlib.suppress(OSError):
            while time.perf_counter() < end_s:
                connected.sendall(block)
        connected.shutdown(socket.SHUT_RDWR)
        reader.join()
    first_s = counted[0][0] + skip_s
    late = [(time_s, num_bytes) for time_s, num_bytes in counted if first_s <= time_s <= end_s]
    return sum(num_bytes for _, num_bytes in late[1:]) * 8e-6 / (late[-1][0] - late[0][0])


def _count(connected: socket.socket, counted: list[tuple[float, int]]) -> None:
    rest = b""
    with contextlib.suppress(OSError):
        while data := connected.recv(65536):
            now_s, rest = time.perf_counter(), rest + data
            whole = len(rest) // 4 * 4
            counts = (int.from_bytes(rest[at : at + 4], "big") for at in range(0, whole, 4))
            counted.append((now_s, sum(counts)))
            rest = rest[whole:]
