"""Measures what TLS and a token cost: `python -m benchmarks.security [--quick]`.

Two verifiers of a synthetic target whose forward costs nothing, one in plaintext, one with TLS and a token,
take turns with the same rounds over the edge's own link. A/A is plaintext against the turn before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.results_file import write_results
from outrider.common.types import CloseRequest, Verdict
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.base import Connection
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity
from outrider.experiments.load.record import ask
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.dev_security import dev_security
from outrider.experiments.shared.processes import VerifierProcess
from outrider.experiments.shared.results import at_most, judged
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.recording import synthetic_recording
from outrider.experiments.synthetic.serve import running_synthetic

NUM_STREAMS = 8
ROUNDS_A_PASS = 24


@dataclass
class _Side:
    """Holds one verifier and what its turns took: seconds of processor time a round, of connecting."""

    verifier: VerifierProcess
    security: LinkSecurity
    server_s: list[float] = field(default_factory=list)
    client_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    connect_s: list[float] = field(default_factory=list)
    connect_cpu_s: list[float] = field(default_factory=list)

    def link(self, session_id: bytes) -> GrpcLink:
        return GrpcLink(self.verifier.address, session_id, security=self.security)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.verifier.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _opened_streams(side: _Side, sessions: tuple[RecordedSession, ...]) -> Iterator[list[Connection]]:
    connections = []
    for session in sessions:
        session_id = new_session_id()
        connections.append(side.link(session_id).connect(10.0))
        ask(connections[-1], session.opening(session_id))
    yield connections
    for connection in connections:
        ask(connection, CloseRequest())
        connection.close()


def _time_rounds(side: _Side, sessions: tuple[RecordedSession, ...], num_passes: int) -> None:
    """Sends every stream's round, then reads every answer: as many in one step as there are streams."""
    with _opened_streams(side, sessions) as connections:
        rounds = [session.requests() for session in sessions]
        server_s, client_s, start_s = side.cpu_s(), time.process_time(), time.perf_counter()
        round_id = 1
        for _ in range(num_passes):
            for number in range(ROUNDS_A_PASS):
                round_id += 1
                for connection, requests in zip(connections, rounds, strict=True):
                    connection.send(replace(requests[number][0], round_id=round_id))
                for connection, requests in zip(connections, rounds, strict=True):
                    verdict = connection.receive(10.0)
                    assert isinstance(verdict, Verdict) and verdict.hash == requests[number][2], verdict
        num_rounds = num_passes * ROUNDS_A_PASS * len(sessions)
        side.round_s.append((time.perf_counter() - start_s) / num_rounds)
        side.client_s.append((time.process_time() - client_s) / num_rounds)
        side.server_s.append((side.cpu_s() - server_s) / num_rounds)


def _time_connecting(side: _Side, num_connections: int) -> None:
    """Times TCP, the handshake and the token, up to the first answer on a stream."""
    cpu_s, start_s = side.cpu_s() + time.process_time(), time.perf_counter()
    connections = []
    for _ in range(num_connections):
        connections.append(side.link(new_session_id()).connect(10.0))
        ask(connections[-1], CloseRequest())
    side.connect_s.append((time.perf_counter() - start_s) / num_connections)
    side.connect_cpu_s.append((side.cpu_s() + time.process_time() - cpu_s) / num_connections)
    for connection in connections:
        connection.close()


def _take_turns(plain: _Side, secured: _Side, is_quick: bool) -> None:
    sessions = synthetic_recording(NUM_STREAMS, ROUNDS_A_PASS).sessions
    num_turns, num_passes, num_connections = (2, 4, 5) if is_quick else (10, 20, 50)
    for turn in range(-1, num_turns):
        for side in (plain, secured):
            _time_rounds(side, sessions, num_passes)
            _time_connecting(side, num_connections)
        if turn < 0:  # to warm up
            for side in (plain, secured):
                for times in (side.server_s, side.client_s, side.round_s, side.connect_s, side.connect_cpu_s):
                    times.clear()


def report(plain: _Side, secured: _Side) -> None:
    """Writes the results."""

    def ratio(of: Callable[[_Side], list[float]]) -> float:
        pairs = zip(of(secured), of(plain), strict=True)
        return statistics.median(upper / lower for upper, lower in pairs)

    def both(side: _Side) -> list[float]:
        return [s + c for s, c in zip(side.server_s, side.client_s, strict=True)]

    def us(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e6:.0f}"

    totals = both(plain)
    a_a = statistics.median(later / former for former, later in pairwise(totals))
    about = f"processor time of a round, TLS and token : plaintext, {NUM_STREAMS} streams"
    ends = f"both ends, {us(both(secured))} : {us(totals)} us (A/A {a_a:.3f})"
    server = f"verifier alone, {us(secured.server_s)} : {us(plain.server_s)} us"
    connect = f"{us(secured.connect_cpu_s)} : {us(plain.connect_cpu_s)} us"
    wall = f"{us(secured.connect_s)} : {us(plain.connect_s)} us"
    most = at_most(1.25)
    measures = [
        judged("security.round_cpu", f"{about}; {ends}", ratio(both), "ratio", most),
        judged("security.server_cpu", f"{about}; {server}", ratio(lambda s: s.server_s), "ratio", most),
        judged("security.round_wall", "time of a round, the same", ratio(lambda s: s.round_s), "ratio", most),
        judged(
            "security.connect_cpu",
            f"processor time until the first answer on a new connection, both ends, {connect}; time {wall}",
            (statistics.median(secured.connect_cpu_s) - statistics.median(plain.connect_cpu_s)) * 1e3,
            "ms more",
            at_most(10.0),
        ),
    ]
    details = {
        name: {"server_s": side.server_s, "client_s": side.client_s, "connect_cpu_s": side.connect_cpu_s}
        for name, side in (("plain", plain), ("secured", secured))
    }
    write_results("security", measures, details)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.security", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: its figures say little")
    is_quick = parser.parse_args().quick
    pair = SyntheticPair()
    with (
        dev_security() as security,
        running_synthetic(pair) as plain_verifier,
        running_synthetic(pair, *security.serve_flags) as secured_verifier,
    ):
        plain, secured = _Side(plain_verifier, PLAINTEXT), _Side(secured_verifier, security.link)
        _take_turns(plain, secured, is_quick)
        report(plain, secured)
    return 0


if __name__ == "__main__":
    run_command("bench_security", main)
