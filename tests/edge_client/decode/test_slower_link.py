"""A link that becomes slower than any deadline so far, in virtual time: rounds are in time again soon."""

from __future__ import annotations

import pytest
from support.edge.virtual import CallersWorld

from outrider.common.errors import RoundTimeoutError
from outrider.common.types import CorrectionKind, ModelInfo, SessionRequest, Verdict, VerifyRequest
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.simulator.world.standins import VirtualClock, virtual_threads


class SlowingLink:
    """Connects in two round trips of `trip_s`, and answers each round one after it was sent, on its connection."""

    address = "slowing:1"

    def __init__(self) -> None:
        self.world, self.trip_s = CallersWorld(), 0.02
        self.traffic = Traffic()

    def connect(self, timeout_s: float) -> SlowingConnection:
        self.world.sleep(2 * self.trip_s)
        return SlowingConnection(self)

    def describe(self, timeout_s: float) -> ModelInfo:
        raise NotImplementedError


class SlowingConnection:
    def __init__(self, link: SlowingLink) -> None:
        self._link = link
        self.queued_s = 0.0
        self._due: list[tuple[float, int]] = []

    def send(self, request: SessionRequest) -> None:
        assert isinstance(request, VerifyRequest)
        self._due.append((self._link.world.now_s + self._link.trip_s, request.round_id))

    def receive(self, timeout_s: float) -> Verdict | None:
        world = self._link.world
        if not self._due or self._due[0][0] > world.now_s + max(0.0, timeout_s):
            world.sleep(timeout_s)
            return None
        due_s, round_id = self._due.pop(0)
        world.sleep(due_s - world.now_s)
        self.queued_s = world.now_s - due_s
        return Verdict(round_id, 0, 7, CorrectionKind.CORRECTION, 1, 0)

    def start_rtt_probe(self) -> None: ...

    def take_rtt(self) -> float | None:
        return None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def connected(link: SlowingLink, is_patient: bool = False) -> RemoteVerifier:
    clock, threads = VirtualClock(link.world), virtual_threads(link.world)
    remote = RemoteVerifier(link, RoundDeadline(), is_patient=is_patient, clock=clock, threads=threads)
    remote.connect()
    return remote


def run_rounds(remote: RemoteVerifier, link: SlowingLink, num_rounds: int) -> list[bool]:
    """Of each round: whether it was answered within its deadline, on the connection that it was sent on."""
    in_time = []
    for _ in range(num_rounds):
        num_reconnects = remote.num_reconnects
        remote.submit(VerifyRequest(remote.next_round_id(), 1, 0))
        try:
            remote.verdict()
            in_time.append(remote.num_reconnects == num_reconnects)
        except RoundTimeoutError:
            in_time.append(False)
            link.world.sleep(0.5)  # the draft goes on alone
            remote.poll_recovery()
        remote.take_late_verdicts()
    return in_time


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_round_trip_that_rises_beyond_the_deadline_is_learnt_in_a_few_rounds(is_patient: bool) -> None:
    link = SlowingLink()
    remote = connected(link, is_patient)
    assert all(run_rounds(remote, link, 64))
    link.trip_s = 0.6
    in_time = run_rounds(remote, link, 16)
    assert not in_time[0]
    assert all(in_time[6:]), in_time


@pytest.mark.parametrize("is_polled", [True, False])
def test_a_trip_ends_when_the_answer_comes_however_late_the_edge_looks(is_polled: bool) -> None:
    link = SlowingLink()
    remote = connected(link)
    for _ in range(2):
        remote.submit(VerifyRequest(remote.next_round_id(), 1, 0))
    link.world.sleep(0.3)  # the edge drafts on
    if is_polled:
        assert None not in remote.poll()
    for _ in range(2):
        assert remote.verdict().wait_s == pytest.approx(link.trip_s)


def test_a_rounds_deadline_counts_from_the_beginning_of_its_draft() -> None:
    link = SlowingLink()
    remote = connected(link)
    link.trip_s = 60.0
    begun_s = link.world.now_s
    link.world.sleep(0.03125)  # drafting
    assert remote.deadline_ms(0.03125) == 369  # the verifier knows how long we wait
    remote.submit(VerifyRequest(remote.next_round_id(), 1, 0), 0.03125)
    with pytest.raises(RoundTimeoutError):
        remote.verdict()
    assert link.world.now_s == pytest.approx(begun_s + 0.4)


def test_one_answer_after_an_outage_hardly_moves_the_deadline() -> None:
    deadline = RoundDeadline()
    deadline.observe(0.02)
    deadline.observe_late(5.0)
    assert deadline.seconds == pytest.approx(1.6)
    for _ in range(20):
        deadline.observe(0.02)
    assert deadline.seconds == 0.4
