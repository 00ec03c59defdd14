"""Measures what a round costs beyond the model: rounds a second, overhead of one, share of a step."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from benchmarks.engine.setup import Bench, generate_load, running_stub
from benchmarks.results_file import Found
from outrider.common.types import CloseRequest, Verdict
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.load.record import ask
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import LoadReport
from outrider.experiments.shared.results import at_least, at_most, judged

NUM_STREAMS = 32
DRAFT_S = 0.001  # four tokens of the embedded draft


def measure_stub_rounds(bench: Bench) -> Found:
    """Runs a closed loop without think time: a connection for each stream, as 32 edges have, and one for
    all."""
    seconds = bench.pick(5.0, 1.0)
    reports: dict[int, list[LoadReport]] = {1: [], NUM_STREAMS: []}
    with running_stub() as stub:
        for turn in range(bench.pick(3, 1)):
            for num_connections, found in reports.items():
                flags = ("--closed", "--sessions", str(NUM_STREAMS), "--seconds", str(seconds))
                report = generate_load(
                    stub.address, bench.stub_file, *flags, "--connections", str(num_connections)
                )
                assert report.is_right, report
                found.append(report)
                bench.say(
                    f"turn {turn + 1}, {num_connections} connections: {report.rounds_per_s:.0f} rounds/s"
                )
    rate = {n: statistics.median(r.rounds_per_s for r in found) for n, found in reports.items()}
    measure = judged(
        "engine.stub_rounds",
        f"rounds a second, stub target, 4 drafts, 32 streams, a connection each (on one: {rate[1]:.0f})",
        rate[NUM_STREAMS],
        "rounds/s",
        at_least(5000),
    )
    return ([measure], {str(n): [asdict(r) for r in found] for n, found in reports.items()})


# ---------------------------------------------------------------------------------- one round alone


class _RoundTime(NamedTuple):
    beyond_forward_ms: float  # as the edge saw it
    inside_ms: float  # as the verifier saw it


def _time_rounds(
    address: str, recorded: RecordedSession, think_s: float, num_passes: int
) -> list[_RoundTime]:
    session_id = new_session_id()
    connection = GrpcLink(address, session_id).connect(10.0)
    ask(connection, recorded.opening(session_id))
    times, round_id = [], 1
    for _ in range(num_passes):
        for request, position, hash_ in recorded.requests():
            round_id += 1
            time.sleep(think_s)
            start_ns = time.perf_counter_ns()
            verdict = ask(connection, replace(request, round_id=round_id))
            wall_ns = time.perf_counter_ns() - start_ns
            assert isinstance(verdict, Verdict), verdict
            assert (verdict.position, verdict.hash) == (position, hash_), "not the recorded text"
            metrics = verdict.metrics
            beyond_ns, inside_ns = wall_ns - metrics.forward_ns, metrics.total_ns - metrics.forward_ns
            times.append(_RoundTime(beyond_ns / 1e6, inside_ns / 1e6))
    ask(connection, CloseRequest())
    connection.close()
    return times


def measure_overhead(bench: Bench) -> Found:
    """Times the rounds of one session alone, a draft's time between them; for comparison also back to
    back."""
    sampled = [s for s in bench.recording.sessions if s.sampling.temperature][:3]
    greedy = [s for s in bench.recording.sessions if not s.sampling.temperature][:3]
    kinds = {
        "sampled": (sampled, DRAFT_S),
        "greedy": (greedy, DRAFT_S),
        "sampled, back to back": (sampled, 0.0),
    }
    times: dict[str, list[_RoundTime]] = {kind: [] for kind in kinds}
    for turn in range(bench.pick(4, 1)):
        for kind, (sessions, think_s) in kinds.items():
            for session in sessions:
                times[kind] += _time_rounds(bench.verifier.address, session, think_s, bench.pick(3, 1))
        bench.say(f"turn {turn + 1}: {_median_beyond(times['sampled']):.2f} ms beyond the forward")
    details: dict[str, Any] = {
        kind: {
            "beyond_forward_ms": _median_beyond(found),
            "of_that_inside_the_verifier_ms": round(statistics.median(t.inside_ms for t in found), 4),
            "num_rounds": len(found),
        }
        for kind, found in times.items()
    }
    both = _median_beyond(times["sampled"] + times["greedy"])
    measure = judged(
        "engine.overhead_ms",
        f"one round over loopback beyond the forward, median: greedy {_median_beyond(times['greedy']):.2f}, "
        f"sampled {_median_beyond(times['sampled']):.2f} (without a draft's time between rounds "
        f"{_median_beyond(times['sampled, back to back']):.2f})",
        both,
        "ms",
        at_most(1.0),
    )
    return ([measure], details)


def _median_beyond(times: list[_RoundTime]) -> float:
    return round(statistics.median(t.beyond_forward_ms for t in times), 4)
