"""Pipes of connections that share a bottleneck, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.proxy.pipe import Pipe
from outrider.experiments.links.virtual import VirtualLink


class Timers:
    """Calls what is due when the test lets time pass."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._due: list[_Timer] = []

    def now_s(self) -> float:
        return self.time_s

    def call_at(self, time_s: float, what: Callable[[], None]) -> Any:
        self._due.append(timer := _Timer(self, time_s, what))
        return timer

    def run(self) -> None:
        while self._due:
            timer = min(self._due, key=lambda each: each.time_s)
            self._due.remove(timer)
            self.time_s = max(self.time_s, timer.time_s)
            timer.what()


class _Timer:
    def __init__(self, timers: Timers, time_s: float, what: Callable[[], None]) -> None:
        self._timers, self.time_s, self.what = timers, time_s, what

    def cancel(self) -> None:
        if self in self._timers._due:
            self._timers._due.remove(self)


class Sink:
    """Notes what is written, and when."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.written: list[tuple[float, bytes]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append((self._timers.time_s, data))

    def write_eof(self) -> None:
        self.write(b"")

    def close(self) -> None:
        pass


def test_a_connection_that_is_not_open_yet_holds_up_no_other() -> None:
    timers, link = Timers(), VirtualLink(LinkProfile(rtt_ms=100, up_mbit=8))
    other = VirtualLink(link.profile, beside=link)
    fresh = Pipe(timers, link.paths[0], link.up, first_s=0.1)
    running = Pipe(timers, link.paths[0], other.up, first_s=0.0)
    fresh_sink, running_sink = Sink(timers), Sink(timers)
    fresh.sink, running.sink = fresh_sink, running_sink  # type: ignore[assignment]
    fresh.put(b"hello")
    fresh.end()
    timers.time_s = 0.01
    running.put(bytes(948))  # 1,000 bytes with headers: 1 ms
    timers.run()
    ((at_s, data),) = running_sink.written
    assert at_s == pytest.approx(0.061) and data == bytes(948)
    assert [data for _, data in fresh_sink.written] == [b"hello", b""]
    assert [at_s for at_s, _ in fresh_sink.written] == pytest.approx([0.15 + 57e-6, 0.15 + 110e-6])
