"""Clients that stop reading, die mid-round, or fall silent: they are gone on time, and nobody else is slower."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field

from benchmarks.engine.setup import QUIET, Bench
from benchmarks.results_file import Found
from outrider.experiments.load.cloud import CloudStream
from outrider.experiments.load.command import LoadPlan, open_streams, run_closed
from outrider.experiments.load.report import Tally, percentile_ms
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.results import judged

NUM_HEALTHY, THINK_S = 8, 0.005
NUM_DYING, NUM_IDLE = 8, 1000
IDLE_PROMPT_TOKENS = 12
TTL_S, SWEEP_S = 15.0, 1.0  # the verifier looks for expired sessions once a second
ON_TIME_S = {"stopped reading": 20.0, "died": 5.0, "idle": TTL_S + 2 * SWEEP_S}
START_S = 60.0  # another generator is at work by then
STALL_WINDOW = 2048  # bytes after which nothing more is read
MAX_P99_RATIO = 2.0
# Sessions that expire are closed by nobody, so the store must hold them all.
FLAGS = (
    *("--session-idle-ttl-s", str(TTL_S), "--max-sessions", str(2 * NUM_IDLE)),
    *("--admin-listen", "127.0.0.1:0", "--max-unread-bytes", "16384"),
)


@dataclass
class _Gauges:
    url: str

    async def read(self, name: str) -> int:
        text = await asyncio.to_thread(_fetch, f"{self.url}/metrics")
        for line in text.splitlines():
            if line.startswith(f"outrider_verifier_{name} "):
                return int(float(line.split()[1]))
        raise RuntimeError(f"no gauge {name} at {self.url}")

    async def wait_until(self, name: str, at_most: int, timeout_s: float) -> float:
        """Returns the seconds until the gauge was that low; infinite where it was not within `timeout_s`."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + timeout_s:
            if await self.read(name) <= at_most:
                return time.perf_counter() - begin_s
            await asyncio.sleep(0.2)
        return float("inf")


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as reply:
        return str(reply.read().decode())


@dataclass
class _Healthy:
    """Holds the rounds of the sessions beside, by the window in which they ended."""

    tally: Tally
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)

    async def watch(self, name: str, quiet_s: float, work: Awaitable[float]) -> float:
        """Awaits `work`, and `quiet_s` at least; returns what `work` gives."""
        begin_s = time.perf_counter()
        found, _ = await asyncio.gather(work, asyncio.sleep(quiet_s))
        self.windows[name] = (begin_s, time.perf_counter())
        return found

    def p99_ms(self, name: str) -> float:
        begin_s, end_s = self.windows[name]
        return percentile_ms(
            sorted(r.latency_s for r in self.tally.rounds if begin_s <= r.end_s < end_s), 0.99
        )


def measure_dead_clients(bench: Bench) -> Found:
    """Runs 8 sessions while a generation is not read, 8 sessions are killed, and 1,000 are idle."""
    with running_verifier(*QUIET, *FLAGS) as verifier:
        healthy, gone_s = asyncio.run(_run(bench, verifier))
    tally = healthy.tally
    assert not tally.num_mismatches and not tally.errors, (tally.mismatches, tally.errors)
    alone_ms = healthy.p99_ms("alone")
    p99_ms = {name: healthy.p99_ms(name) for name in healthy.windows}
    worst = max(("stopped reading", "died", "idle"), key=p99_ms.__getitem__)
    refused = len(tally.refusals)
    late = [name for name, limit_s in ON_TIME_S.items() if gone_s[name] > limit_s]
    gone = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in gone_s.items())
    measure = judged(
        "engine.dead_clients",
        f"others' p99 beside the worst of them ({worst}) : alone (A/A {p99_ms['again'] / alone_ms:.2f}); "
        f"{refused} of their rounds refused; gone after: {gone}",
        p99_ms[worst] / alone_ms,
        "ratio",
        (f"on time; <= {MAX_P99_RATIO:g}", lambda ratio: ratio <= MAX_P99_RATIO and not late and not refused),
    )
    return (
        [measure],
        {"p99_ms": p99_ms, "gone_s": gone_s, "on_time_s": ON_TIME_S, "late": late, "refused": refused},
    )


async def _run(bench: Bench, verifier: VerifierProcess) -> tuple[_Healthy, dict[str, float]]:
    gauges, healthy, is_over = _Gauges(verifier.admin_url), _Healthy(Tally()), asyncio.Event()
    plan, quiet_s = LoadPlan(NUM_HEALTHY, think_s=THINK_S), bench.pick(5.0, 1.0)
    gone_s: dict[str, float] = {}
    async with open_streams(verifier.address, bench.recording, plan, healthy.tally) as streams:
        rounds = [
            asyncio.create_task(run_closed(stream, THINK_S, healthy.tally, is_over.is_set))
            for stream in streams
        ]
        await asyncio.sleep(1.0)
        for name in ("alone", "again"):
            await healthy.watch(name, quiet_s, asyncio.sleep(0.0, result=0.0))
        for name, go_wrong in (("stopped reading", _stop_reading), ("died", _die), ("idle", _lie_idle)):
            async with go_wrong(verifier.address, bench, gauges) as (gauge, num_left):
                gone = gauges.wait_until(gauge, num_left, ON_TIME_S[name] + 5.0)
                gone_s[name] = await healthy.watch(name, quiet_s, gone)
            bench.say(f"{name}: gone after {gone_s[name]:.1f} s, others' p99 {healthy.p99_ms(name):.1f} ms")
        is_over.set()
        await asyncio.gather(*rounds)
    return healthy, gone_s


# Each of these lets clients go wrong, then names the gauge that must fall and how low.


@contextlib.asynccontextmanager
async def _stop_reading(address: str, bench: Bench, gauges: _Gauges) -> AsyncIterator[tuple[str, int]]:
    """Starts a long generation whose client takes 2 KB and no more."""
    connection = await connect(address, STALL_WINDOW)
    stream = CloudStream(connection, bench.recording.sessions[0].prompt_ids)
    opened = (await stream.open()).opened
    stream.ask_to_generate(3500, opened.position, opened.hash)
    yield "streams", NUM_HEALTHY
    connection.close()


@contextlib.asynccontextmanager
async def _die(address: str, bench: Bench, gauges: _Gauges) -> AsyncIterator[tuple[str, int]]:
    command = [
        sys.executable,
        "-m",
        "outrider.experiments.load",
        "--address",
        address,
        "--closed",
        "--warmup-s",
        "0",
    ]
    flags = ["--recording", str(bench.recording_file), "--sessions", str(NUM_DYING), "--seconds", "60"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(START_S):
            while await gauges.read("streams") < NUM_HEALTHY + NUM_DYING:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
    finally:
        process.kill()
        process.wait()
    yield "streams", NUM_HEALTHY


@contextlib.asynccontextmanager
async def _lie_idle(address: str, bench: Bench, gauges: _Gauges) -> AsyncIterator[tuple[str, int]]:
    num_idle = bench.pick(NUM_IDLE, 100)
    connection = await connect(address)
    for group in _groups(num_idle, 50):
        streams = [
            CloudStream(connection, tuple(1 + (31 * number + i) % 7000 for i in range(IDLE_PROMPT_TOKENS)))
            for number in group
        ]
        await asyncio.gather(*(stream.open() for stream in streams))
    yield "sessions", NUM_HEALTHY
    connection.close()


def _groups(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))
