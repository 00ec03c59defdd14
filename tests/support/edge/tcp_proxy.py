"""A TCP proxy on loopback that can swallow everything, or cut its connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_FAULT_AFTER_BYTES = 400  # from the verifier on one connection: its first answers have passed


class TcpProxy:
    """`with TcpProxy(port) as proxy: ... proxy.port`; `is_swallowing` loses bytes both ways, for good.

    Each connection over which the verifier has answered meets the next of `faults` ("cut" or "swallow"), if any.
    """

    def __init__(self, target_port: int, faults: Sequence[str] = ()) -> None:
        self.target_port = target_port
        self.faults = list(faults)
        self.is_swallowing = False
        self.num_accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._poisoned: set[socket.socket] = set()
        self._num_bytes: Counter[socket.socket] = Counter()
        self._selector = selectors.DefaultSelector()
        self._is_over = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    def cut(self) -> None:
        """Closes every connection there is."""
        with self._lock:
            for pair in self._pairs:
                self._close(pair)
            self._pairs.clear()

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for each in pair:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.01):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._forward(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        self.num_accepted += 1
        try:
            far = socket.create_connection(("127.0.0.1", self.target_port))
        except OSError:
            near.close()
            return
        self._pairs.append((near, far))
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        pair = next((p for p in self._pairs if source in p), None)
        if pair is None:
            return
        sink = pair[1] if source is pair[0] else pair[0]
        try:
            data = source.recv(65536)
            fault = self._fault(pair, source, len(data))
            if fault == "cut":
                data = b""
            # Bytes once lost are missed for ever: such a connection never works again.
            if self.is_swallowing or fault == "swallow" or source in self._poisoned:
                self._poisoned.update(pair)
            elif data:
                sink.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._pairs.remove(pair)
            self._close(pair)

    def _fault(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, size: int) -> str:
        """Returns what becomes of these bytes: "" where they pass."""
        far = pair[1]
        self._num_bytes[far] += size if source is far else 0
        is_due = self._num_bytes[far] > _FAULT_AFTER_BYTES and far not in self._poisoned
        return self.faults.pop(0) if self.faults and is_due else ""
