"""One direction of one connection through the proxy: chunks go in when they come, out when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol

from outrider.experiments.links.packets import PacketPath
from outrider.experiments.links.virtual import SEGMENT_BYTES, Flow, wire_bytes

MAX_HELD_BYTES = 4 << 20  # on their way at once, as with a receive window of 4 MB
_RETRY_S = 0.0002
_END, _BREAK = b"", None  # held beside bytes: the source closed its side, or was reset


class Clock(Protocol):
    """Counts seconds since the link opened."""

    def now_s(self) -> float:
        """Returns the time."""

    def call_at(self, time_s: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls `what` at `time_s`."""


class Pipe:
    """Carries one direction. `source` and `sink` are set when their sockets are connected; nothing enters
    before `first_s`."""

    def __init__(self, clock: Clock, path: PacketPath, flow: Flow, first_s: float) -> None:
        self._clock, self._path, self._flow, self._first_s = clock, path, flow, first_s
        queue_segments = int(path.queue_bytes // wire_bytes(SEGMENT_BYTES)) if path.queue_bytes else 16
        self._chunk_bytes = max(1, min(16, queue_segments)) * SEGMENT_BYTES
        self._unsent = bytearray()  # what the full queue has no room for
        self._held: deque[tuple[float, bytes | None]] = deque()
        self._num_held_bytes = 0
        self._due: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self.is_sink_full = False
        self.has_ended = self.is_over = False  # the end went in; came out
        self.opposite: Pipe = self
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None
        self.num_wire_bytes = 0

    def put(self, data: bytes) -> None:
        """Takes what the source sent."""
        self._unsent += data
        self._admit()

    def end(self) -> None:
        """Closes the sink, after what is on its way: the source closed its side."""
        self.has_ended = True
        self._admit()
        if self.opposite.is_over and self.source is not None:
            self.source.close()

    def break_off(self) -> None:
        """Resets the sink, after what is on its way: the source was reset."""
        self._unsent.clear()
        self._hold(_BREAK, 1)

    def _admit(self) -> None:
        """Sends what the queue has room for; the rest holds the source back."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._clock.now_s() < self._first_s and (self._unsent or self.has_ended):
            # Nor into the bottleneck, which other connections share.
            self._retry = self._clock.call_at(self._first_s, self._admit)
            self._regulate()
            return
        while self._unsent:
            chunk = bytes(self._unsent[: self._chunk_bytes])
            now_s = self._clock.now_s()
            if not self._path.has_room(now_s, wire_bytes(len(chunk))):
                self._retry = self._clock.call_at(now_s + _RETRY_S, self._admit)
                break
            del self._unsent[: len(chunk)]
            self._hold(chunk, len(chunk))
        if self.has_ended and not self._unsent:
            self._hold(_END, 1)  # a FIN takes a number of the sequence, as a byte does
        self._regulate()

    def _hold(self, chunk: bytes | None, num_bytes: int) -> None:
        now_s = self._clock.now_s()
        due_s = self._flow.deliver(max(now_s, self._first_s), num_bytes)
        self.num_wire_bytes += wire_bytes(num_bytes)
        self._num_held_bytes += num_bytes
        self._held.append((due_s, chunk))
        if due_s <= now_s:
            self.release()
        elif self._due is None:
            self._due = self._clock.call_at(due_s, self.release)

    def release(self) -> None:
        """Passes on what is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self.sink is None:
            return  # whoever connects it calls again
        now_s = self._clock.now_s()
        while self._held and self._held[0][0] <= now_s and not self.is_sink_full:
            chunk = self._held.popleft()[1]
            self._num_held_bytes -= len(chunk) if chunk else 1
            self._pass_on(self.sink, chunk)
        if self._held and not self.is_sink_full:
            self._due = self._clock.call_at(self._held[0][0], self.release)
        self._regulate()

    def _pass_on(self, sink: asyncio.Transport, chunk: bytes | None) -> None:
        if sink.is_closing():
            return
        if chunk is _BREAK:
            reset(sink)
        elif chunk == _END:
            self.is_over = True
            with contextlib.suppress(OSError):
                sink.write_eof()
            if self.opposite.has_ended:
                sink.close()
        else:
            sink.write(chunk)

    def _regulate(self) -> None:
        source = self.source
        if source is None or source.is_closing() or self.has_ended:
            return
        should_read = not self._unsent and self._num_held_bytes < MAX_HELD_BYTES
        if should_read and not source.is_reading():
            source.resume_reading()
        elif not should_read and source.is_reading():
            source.pause_reading()


def reset(transport: asyncio.WriteTransport) -> None:
    """Ends a connection with a TCP reset: that is what closing does to one that lingers for no time."""
    no_time = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
    transport.abort()
