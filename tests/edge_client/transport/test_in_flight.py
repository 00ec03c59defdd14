"""Requests in flight: how long a look for answers waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.common.types import CorrectionKind, Verdict, VerifyRequest
from outrider.edge_client.transport.in_flight import InFlight
from outrider.edge_client.transport.link.base import Traffic


def test_a_poll_waits_for_the_oldest_answer_and_for_no_other() -> None:
    until_s: list[float] = []
    verdict = Verdict(1, 0, 5, CorrectionKind.CORRECTION, 11, 0)
    replies: list[Verdict | None] = [None, verdict, None, None]

    def receive(until: float) -> Verdict | None:
        until_s.append(until)
        return replies.pop(0)

    connection = SimpleNamespace(send=lambda request: None)
    connections: Any = SimpleNamespace(
        connection=connection, traffic=Traffic(), receive=receive, arrival_s=100.0
    )
    clock: Any = SimpleNamespace(now=lambda: 100.0)
    in_flight = InFlight(connections, 60.0, False, clock, lambda request, reply: None)
    in_flight.poll(0.5)
    assert until_s == [100.0], "nothing is in flight"
    in_flight.submit(VerifyRequest(1, 10, 0), 1.0)
    in_flight.poll(0.5)
    assert until_s[1:] == [100.5, 100.0], "then it is answered"
    in_flight.poll(0.5)
    assert until_s[3:] == [100.0] and in_flight.outstanding[0].reply is verdict
