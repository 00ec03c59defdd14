"""A link that misbehaves at chosen rounds, around a real one; it counts what it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.common.errors import LinkError
from outrider.common.types import SessionRequest, SessionResponse, Verdict, VerifyRequest
from outrider.edge_client.transport.link.base import Connection, VerifierLink


@dataclass
class Faults:
    """Which rounds (counted by this link, from 1) suffer what; `fired` counts what really happened."""

    lose_reply: frozenset[int] = frozenset()
    duplicate: frozenset[int] = frozenset()
    late_older: frozenset[int] = frozenset()
    drop_stream: frozenset[int] = frozenset()
    black_hole: Callable[[], bool] = lambda: False  # while true nothing passes, either way
    fired: dict[str, int] = field(default_factory=dict)
    num_rounds: int = 0
    sent: list[VerifyRequest] = field(default_factory=list)
    to_lose: set[int] = field(default_factory=set)  # round ids, on whichever connection their reply comes

    def count(self, name: str) -> None:
        self.fired[name] = self.fired.get(name, 0) + 1


class FaultyLink:
    def __init__(self, link: VerifierLink, faults: Faults) -> None:
        self._link, self._faults = link, faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def connect(self, timeout_s: float) -> Connection:
        if self._faults.black_hole():
            time.sleep(min(timeout_s, 0.05))
            raise LinkError("black hole")
        return FaultyConnection(self._link.connect(timeout_s), self._faults)


class FaultyConnection:
    def __init__(self, connection: Connection, faults: Faults) -> None:
        self._connection, self._faults = connection, faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def send(self, request: SessionRequest) -> None:
        faults = self._faults
        if faults.black_hole():
            faults.count("black_hole")
            return
        if not isinstance(request, VerifyRequest) or request in faults.sent:
            self._connection.send(request)
            return
        faults.num_rounds += 1
        number = faults.num_rounds
        faults.sent.append(request)
        if number in faults.drop_stream:
            faults.count("drop_stream")
            self._connection.close()
            raise LinkError("dropped by the test")
        self._connection.send(request)
        if number in faults.duplicate:
            faults.count("duplicate")
            self._connection.send(request)
        if number in faults.late_older and number > 2:
            faults.count("late_older")
            self._connection.send(faults.sent[number - 3])
        if number in faults.lose_reply:
            faults.to_lose.add(request.round_id)

    def receive(self, timeout_s: float) -> SessionResponse | None:
        reply = self._connection.receive(timeout_s)
        if reply is not None and self._faults.black_hole():
            self._faults.count("black_hole")
            return None
        if isinstance(reply, Verdict) and reply.round_id in self._faults.to_lose:
            self._faults.to_lose.remove(reply.round_id)
            self._faults.count("lose_reply")
            return None
        return reply
