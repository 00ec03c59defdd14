"""Attempts to connect overlap: the first to connect wins, and none is thrown away for a later one."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.calls import eventually
from support.edge.edge_fakes import make_model
from support.edge.virtual import CallersWorld
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.errors import LinkError
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    ModelInfo,
    Opened,
    OpenRequest,
    SamplingParams,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.transport import reconnect as reconnect_module
from outrider.edge_client.transport.breaker import CircuitBreaker
from outrider.edge_client.transport.connection import ConnectionManager
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.reconnect import Reconnector
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.simulator.world.standins import VirtualClock, virtual_threads

PATIENCE_S = 60.0  # of these tests with a thread; nothing is waited for so long unless something is broken


class Attempt:
    """One call of `connect`, which the test ends."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_closed = threading.Event()
        self._end = threading.Event()
        self._error: LinkError | None = None

    def wait(self) -> Attempt:
        assert self._end.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return self

    def succeed(self) -> None:
        self._end.set()

    def fail(self) -> None:
        if not self._end.is_set():
            self._error = LinkError(f"no answer in {self.timeout_s:.1f} s")
            self._end.set()

    def close(self) -> None:
        self.is_closed.set()


class SlowLink:
    """Every attempt takes until the test says what comes of it."""

    address = "slow:1"

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.traffic = Traffic()
        self._news = threading.Condition()
        self._is_over = False

    def connect(self, timeout_s: float) -> Attempt:
        attempt = Attempt(timeout_s)
        if self._is_over:
            attempt.fail()
        with self._news:
            self.attempts.append(attempt)
            self._news.notify_all()
        return attempt.wait()

    def end(self) -> None:
        """Whoever still waits, or comes, fails."""
        self._is_over = True
        for attempt in self.attempts:
            attempt.fail()

    def wait_for(self, num_attempts: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.attempts) >= num_attempts, PATIENCE_S)

    def describe(self, timeout_s: float) -> ModelInfo:
        return make_model()


@pytest.fixture
def link() -> Iterator[SlowLink]:
    link = SlowLink()
    yield link
    link.end()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect_module, "_FIRST_INTERVALS_S", (0.0,))


def make_breaker(*, is_open: bool) -> CircuitBreaker:
    breaker = CircuitBreaker(SYSTEM_CLOCK, attempt_interval_s=0.005)
    if is_open:
        breaker.record_failure()
    return breaker


@pytest.mark.parametrize("is_open", [False, True])
def test_a_slow_first_attempt_wins_though_a_later_one_runs(
    link: SlowLink, is_open: bool, no_patience: None
) -> None:
    ready = threading.Event()
    reconnector = Reconnector(link, make_breaker(is_open=is_open), ready.set)  # type: ignore[arg-type]
    reconnector.start()
    link.wait_for(3)
    link.attempts[0].succeed()
    assert ready.wait(PATIENCE_S)
    assert reconnector.take(PATIENCE_S) is link.attempts[0]
    link.attempts[1].succeed()
    assert link.attempts[1].is_closed.wait(PATIENCE_S), "one connection is enough"
    assert not link.attempts[0].is_closed.is_set()


def test_a_later_attempt_wins_where_the_first_was_lost(link: SlowLink, no_patience: None) -> None:
    reconnector = Reconnector(link, make_breaker(is_open=False))  # type: ignore[arg-type]
    reconnector.start()
    link.wait_for(2)
    link.attempts[1].succeed()
    assert reconnector.take(PATIENCE_S) is link.attempts[1]


class FarLink:
    """In virtual time: every connection takes `takes_s`, and fails where that is more than it may."""

    def __init__(self, clock: VirtualClock, takes_s: float) -> None:
        self._clock, self._takes_s = clock, takes_s
        self.timeouts_s: list[float] = []

    def connect(self, timeout_s: float) -> Attempt:
        self.timeouts_s.append(timeout_s)
        self._clock.sleep(min(timeout_s, self._takes_s))
        if timeout_s < self._takes_s:
            raise LinkError("no answer")
        return Attempt(timeout_s)


def test_some_attempts_have_time_for_a_slow_link_and_all_have_what_the_last_connection_took() -> None:
    world = CallersWorld()
    clock = VirtualClock(world)
    link, breaker = FarLink(clock, takes_s=3.0), CircuitBreaker(clock, attempt_interval_s=0.2)
    breaker.record_failure()
    reconnector = Reconnector(link, breaker, clock=clock, threads=virtual_threads(world))  # type: ignore[arg-type]
    reconnector.start()
    assert reconnector.take(PATIENCE_S) is not None and reconnector.connect_s == pytest.approx(3.0)
    assert link.timeouts_s[:7] == [4.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0]
    link.timeouts_s.clear()
    reconnector.start()
    assert reconnector.take(PATIENCE_S) is not None
    assert link.timeouts_s[:2] == pytest.approx([12.0, 6.0])


def in_background(function: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_a_failed_attempt_is_no_end_while_another_is_under_way(link: SlowLink, no_patience: None) -> None:
    connections = ConnectionManager(link)  # type: ignore[arg-type]
    thread, raised = in_background(lambda: connections.connect(0.0))
    link.wait_for(2)
    link.attempts[1].fail()
    link.wait_for(3)
    link.attempts[0].succeed()
    thread.join(PATIENCE_S)
    assert not raised and connections.connection is link.attempts[0]


def test_without_patience_the_first_failure_of_all_ends_the_search(link: SlowLink) -> None:
    thread, raised = in_background(lambda: ConnectionManager(link).connect(0.0))  # type: ignore[arg-type]
    link.wait_for(1)
    link.attempts[0].fail()
    thread.join(PATIENCE_S)
    assert [str(error) for error in raised] == ["no answer in 4.0 s"]


def test_who_waits_for_a_connection_is_told_so_once(link: SlowLink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(
        logging.WARNING, logger="outrider.edge_client"
    )  # whatever a test before this one has set
    link.end()
    world = CallersWorld()
    connections = ConnectionManager(link, VirtualClock(world), virtual_threads(world))  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="no answer in"):
        connections.connect(60.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("no connection to slow:1 yet (no answer in") and "trying for" in line


def test_who_may_go_alone_does_not_wait_for_a_slow_link_and_gets_it_later(link: SlowLink) -> None:
    connections = ConnectionManager(link)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="no connection to slow:1"):
        connections.connect(0.0, at_most_s=0.0)
    link.wait_for(1)
    link.attempts[0].succeed()
    assert eventually(lambda: connections.poll_recovery()[0])
    assert connections.connection is link.attempts[0]


class Stream:
    """In virtual time: a connection that answers a generation with its last tokens at once, or never."""

    queued_s = 0.0

    def __init__(self, clock: VirtualClock, *, is_silent: bool) -> None:
        self._clock, self._is_silent = clock, is_silent
        self._answers: list[GeneratedTokens] = []

    def send(self, request: GenerateRequest) -> None:
        if not self._is_silent:
            self._answers.append(GeneratedTokens(request.round_id, (7,), (), 6, 0, is_last=True))

    def receive(self, timeout_s: float) -> GeneratedTokens | None:
        if not self._answers:
            self._clock.sleep(timeout_s)
        return self._answers.pop() if self._answers else None

    def wake(self) -> None: ...

    def close(self) -> None: ...


class StreamLink:
    """Its first connection is silent."""

    address = "stream:1"

    def __init__(self, clock: VirtualClock) -> None:
        self.traffic = Traffic()
        self._clock = clock
        self._num_made = itertools.count()

    def connect(self, timeout_s: float) -> Stream:
        return Stream(self._clock, is_silent=next(self._num_made) == 0)


def test_a_generation_does_not_wait_for_a_stream_that_its_replaced_connection_ended() -> None:
    world = CallersWorld()
    clock = VirtualClock(world)
    link: Any = StreamLink(clock)
    remote = RemoteVerifier(link, RoundDeadline(), clock=clock, threads=virtual_threads(world))
    remote.connect()
    remote.mark_suspect()
    start_s = clock.now()
    assert not list(remote.generate(GenerateRequest(1, 5, 0, max_new_tokens=3), 10.0, PATIENCE_S))
    assert clock.now() - start_s < 1.0
    (tokens,) = remote.generate(GenerateRequest(2, 5, 0, max_new_tokens=3), 10.0, PATIENCE_S)
    assert tokens.token_ids == (7,)


def test_a_connection_in_reserve_does_not_supersede_the_one_in_use() -> None:
    backend = FakeBackend()
    with serving(backend) as server:
        link = GrpcLink(f"127.0.0.1:{server.port}", b"s" * 16)
        used, reserve = link.connect(5.0), None
        used.send(OpenRequest(b"s" * 16, (5, 6, 7), 3, SamplingParams()))
        opened = used.receive(5.0)
        assert isinstance(opened, Opened)
        reserve = link.connect(5.0)
        for number in range(1, 4):
            used.send(VerifyRequest(number, opened.position, opened.hash))
            assert isinstance(used.receive(5.0), Verdict)
        reserve.send(VerifyRequest(4, opened.position, opened.hash))
        assert isinstance(reserve.receive(5.0), Verdict)
        with pytest.raises(LinkError, match="aborted"):
            used.receive(5.0)
        used.close()
        reserve.close()
