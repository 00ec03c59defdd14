"""A load generator: many sessions in one process replay recorded drafts against a verifier in another.

So the verifier is measured without draft models competing for its cores, and every verdict is checked.

    python -m outrider.experiments.load --address HOST:PORT --recording FILE --sessions 16 --closed --think-ms 5
    python -m outrider.experiments.load --address HOST:PORT --recording FILE --sessions 256 --rate 500 --seconds 30
    python -m outrider.experiments.load --address HOST:PORT --recording TRACES --closed --depth-policy optimal
    python -m outrider.experiments.load --address HOST:PORT --recording F --closed --mode auto --depth-policy optimal
    python -m outrider.experiments.load --address HOST:PORT --recording TRACES --closed --mode cloud-only

Closed loop: a session sends its next round `--think-ms` (draft time plus round trip) after the last verdict.
Open loop: rounds arrive at `--rate`, whatever became of those before, and take the next session that is free;
a refused round is dropped. Always ends: `--seconds` after the warm-up, plus a grace for what is under way.

A recording of traces (`record --traces`) is replayed with the drafts that `--depth-policy` asks for, or written by the
verifier itself (`--mode`), the same texts in all ways.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from outrider.common.errors import LinkError, UsageError
from outrider.edge_client.controller.depth.fixed import DEFAULT_DEPTH
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.load.cloud import ReplayedText
from outrider.experiments.load.drafting import Drafting, DraftingStream
from outrider.experiments.load.recording import RecordedSession, Recording
from outrider.experiments.load.report import LoadReport, Tally
from outrider.experiments.load.stream import ReplayStream
from outrider.experiments.load.wire import StreamLost, WireConnection, connect
from outrider.experiments.shared.verifier_metrics import memory_peaks, read_metrics

DESCRIBE_TIMEOUT_S = 10.0
GRACE_S = 5.0  # how long rounds under way at the end may take before they count as hung
MODES = (
    ExecutionMode.SPECULATIVE,
    ExecutionMode.AUTO,
    ExecutionMode.CLOUD_ONLY,
    ExecutionMode.CO_LOCATED,
)
DRAFTING_MODES = (ExecutionMode.SPECULATIVE, ExecutionMode.AUTO)


CallT = TypeVar("CallT", ReplayStream, ReplayedText)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Says what is offered to the verifier; a `rate` of 0 is the closed loop."""

    num_sessions: int
    rate: float = 0.0  # arrivals a second
    think_s: float = 0.0
    seconds: float = 5.0
    warmup_s: float = 1.0
    deadline_s: float = 0.4
    num_connections: int = 1
    seed: int = 0
    mode: ExecutionMode = ExecutionMode.SPECULATIVE
    depth_policy: str = ""  # of sessions recorded as traces; "": rounds as they were recorded
    # Where the policy starts, or what the verifier drafts (co-located).
    num_speculative_tokens: int | None = None
    draft_token_s: float = 0.0  # that a session takes for each drafted token

    @property
    def drafting(self) -> Drafting:
        """Returns how sessions recorded as traces draft."""
        may_stream = self.mode is ExecutionMode.AUTO
        return Drafting(self.depth_policy, self.num_speculative_tokens, self.draft_token_s, may_stream)

    def check(self, recording: Recording) -> None:
        """Raises `UsageError` where the recording has not what the plan replays."""
        is_traced = all(session.trace is not None for session in recording.sessions)
        if self.mode is ExecutionMode.AUTO and not is_traced:
            raise UsageError("--mode auto needs traces: record them with --traces 128")
        if is_traced and not self.depth_policy and self.mode in DRAFTING_MODES:
            raise UsageError("--recording holds traces: say how to draft, --depth-policy fixed or optimal")
        if self.depth_policy and not is_traced:
            raise UsageError("--depth-policy needs traces: record them with --traces 128")
        if (self.depth_policy or self.mode is not ExecutionMode.SPECULATIVE) and self.rate:
            raise UsageError(
                "--rate replays recorded rounds: leave out --mode and --depth-policy, or take --closed"
            )


async def run_load(address: str, recording: Recording, plan: LoadPlan) -> LoadReport:
    """Opens the sessions, runs the plan, closes them. Raises `UsageError` for another target's recording, and for
    one that has not what the plan replays."""
    plan.check(recording)
    tally = Tally()
    if plan.mode not in DRAFTING_MODES:
        return await _run_texts(address, recording, plan, tally)
    async with open_streams(address, recording, plan, tally) as streams:
        since_s = time.perf_counter() + plan.warmup_s
        until_s = since_s + plan.seconds
        if plan.rate:
            running = await _run_open(streams, plan, tally, until_s)
        else:
            running = await _run_closed(streams, plan, tally, until_s)
        tally.num_hung = await _settle(running)
    return tally.report(since_s, until_s, plan.deadline_s)


@contextlib.asynccontextmanager
async def open_streams(
    address: str, recording: Recording, plan: LoadPlan, tally: Tally
) -> AsyncIterator[list[ReplayStream]]:
    """Opens sessions, the recorded ones in turn, over several connections. Raises `LinkError`."""
    deadline_ms = int(plan.deadline_s * 1e3)

    def make(connection: WireConnection, recorded: RecordedSession) -> ReplayStream:
        if not plan.depth_policy:
            return ReplayStream(connection, recorded, tally, deadline_ms=deadline_ms)
        return DraftingStream(connection, recorded, tally, plan.drafting, deadline_ms=deadline_ms)

    async with _opened(address, recording, plan, tally, make) as streams:
        yield streams


@contextlib.asynccontextmanager
async def _opened(
    address: str,
    recording: Recording,
    plan: LoadPlan,
    tally: Tally,
    make: Callable[[WireConnection, RecordedSession], CallT],
) -> AsyncIterator[list[CallT]]:
    recording.check_target(GrpcLink(address, new_session_id()).describe(DESCRIBE_TIMEOUT_S))
    connections = [await connect(address) for _ in range(plan.num_connections)]
    try:
        streams = [
            make(connections[i % len(connections)], recording.sessions[i % len(recording.sessions)])
            for i in range(plan.num_sessions)
        ]
        try:
            await asyncio.gather(*(stream.open() for stream in streams))
        except StreamLost as error:
            raise LinkError(f"the verifier at {address} did not open the sessions: {error}") from error
        yield streams
        _, open_still = await asyncio.wait(
            [asyncio.create_task(stream.close()) for stream in streams], timeout=GRACE_S
        )
        tally.errors += Counter({"not_closed": len(open_still)})
    finally:
        for connection in connections:
            connection.close()


async def _run_texts(address: str, recording: Recording, plan: LoadPlan, tally: Tally) -> LoadReport:
    """Has the verifier write the sessions' texts, again and again until the time is over."""
    is_co_located = plan.mode is ExecutionMode.CO_LOCATED
    num_drafted = (plan.num_speculative_tokens or DEFAULT_DEPTH) if is_co_located else 0

    def make(connection: WireConnection, recorded: RecordedSession) -> ReplayedText:
        return ReplayedText(connection, recorded, tally, num_drafted)

    async def drive(stream: ReplayedText) -> None:
        with _counting_losses(tally):
            while True:
                await stream.text()

    async with _opened(address, recording, plan, tally, make) as streams:
        since_s = time.perf_counter() + plan.warmup_s
        until_s = since_s + plan.seconds
        tasks = [asyncio.create_task(drive(stream)) for stream in streams]
        await asyncio.wait(tasks, timeout=until_s - time.perf_counter())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
    return tally.report(since_s, until_s, plan.deadline_s)


# ---------------------------------------------------------------------------------------- closed loop


async def _run_closed(
    streams: Sequence[ReplayStream], plan: LoadPlan, tally: Tally, until_s: float
) -> set[asyncio.Task[None]]:
    async def drive(stream: ReplayStream, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await run_closed(stream, plan.think_s, tally, lambda: time.perf_counter() >= until_s)

    # Spread over one think time: edges do not start in step.
    tasks = {
        asyncio.create_task(drive(stream, plan.think_s * i / len(streams)))
        for i, stream in enumerate(streams)
    }
    await asyncio.sleep(until_s - time.perf_counter())
    return tasks


async def run_closed(stream: ReplayStream, think_s: float, tally: Tally, is_over: Callable[[], bool]) -> None:
    """Sends round after round of one session; a refused one is sent again after the time the verifier
    gave."""
    with _counting_losses(tally):
        while not is_over():
            await stream.round_at_last()
            if think_s:
                await asyncio.sleep(think_s)


# ------------------------------------------------------------------------------------------ open loop


async def _run_open(
    streams: Sequence[ReplayStream], plan: LoadPlan, tally: Tally, until_s: float
) -> set[asyncio.Task[None]]:
    arrivals = random.Random(plan.seed)
    free = deque(streams)
    running: set[asyncio.Task[None]] = set()

    async def send(stream: ReplayStream) -> None:
        with _counting_losses(tally):
            await stream.round()
            free.append(stream)

    next_s = time.perf_counter()
    while (now_s := time.perf_counter()) < until_s:
        while next_s <= now_s:
            if free:
                task = asyncio.create_task(send(free.popleft()))
                running.add(task)
                task.add_done_callback(running.discard)
                tally.lags_s.append(now_s - next_s)
            else:
                tally.num_unsent += 1
            next_s += arrivals.expovariate(plan.rate)
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
    return running


@contextlib.contextmanager
def _counting_losses(tally: Tally) -> Iterator[None]:
    try:
        yield
    except StreamLost as error:
        tally.errors["stream_lost"] += 1
        if tally.errors["stream_lost"] <= 3:
            print(f"load: {error}", file=sys.stderr)


async def _settle(tasks: set[asyncio.Task[None]]) -> int:
    if not tasks:
        return 0
    done, pending = await asyncio.wait(tasks, timeout=GRACE_S)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
    return len(pending)


# ----------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    parser.add_argument("--recording", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sessions", type=int, default=16, metavar="N")
    loop = parser.add_mutually_exclusive_group(required=True)
    loop.add_argument("--rate", type=float, default=0.0, metavar="R", help="open loop: rounds a second")
    loop.add_argument("--closed", action="store_true", help="closed loop")
    parser.add_argument("--think-ms", type=float, default=0.0, metavar="T", help="closed loop; default 0")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S")
    parser.add_argument("--warmup-s", type=float, default=1.0, metavar="S")
    parser.add_argument("--deadline-ms", type=float, default=400.0, metavar="T", help="what in time means")
    parser.add_argument("--connections", type=int, default=1, metavar="N", help="TCP connections")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--mode", choices=[str(mode) for mode in MODES], default="speculative")
    parser.add_argument(
        "--depth-policy", choices=DEPTH_POLICIES, default="", help="of traces: drafts by this policy"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="its start; or co-located drafts"
    )
    parser.add_argument(
        "--draft-token-ms", type=float, default=0.0, metavar="T", help="of each drafted token of traces"
    )
    parser.add_argument(
        "--admin-url", default="", metavar="URL", help="admin port, for the verifier's peak memory"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    for name in ("sessions", "seconds", "connections", "deadline_ms"):
        if getattr(arguments, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    if min(arguments.rate, arguments.think_ms, arguments.warmup_s, arguments.draft_token_ms) < 0:
        raise UsageError("--rate, --think-ms, --warmup-s and --draft-token-ms cannot be negative")
    if not arguments.closed and not arguments.rate:
        raise UsageError("--rate must be above 0 (or --closed)")
    plan = LoadPlan(
        num_sessions=arguments.sessions,
        rate=arguments.rate,
        think_s=arguments.think_ms / 1e3,
        seconds=arguments.seconds,
        warmup_s=arguments.warmup_s,
        deadline_s=arguments.deadline_ms / 1e3,
        num_connections=arguments.connections,
        seed=arguments.seed,
        mode=ExecutionMode(arguments.mode),
        depth_policy=arguments.depth_policy,
        num_speculative_tokens=arguments.num_speculative_tokens,
        draft_token_s=arguments.draft_token_ms / 1e3,
    )
    recording = Recording.load(arguments.recording)
    gc.freeze()  # else each garbage collection scans the recording: 0.1 s in which nothing is read
    report = asyncio.run(run_load(arguments.address, recording, plan))
    if arguments.admin_url:
        report = replace(report, memory=memory_peaks(read_metrics(arguments.admin_url)))
    print(json.dumps(asdict(report)) if arguments.json else "\n".join(report.lines()))
    return 0 if report.is_right else 1
