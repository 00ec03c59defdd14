"""Clients that stop reading, die mid-round, or fall silent: gone on time, and nobody else feels them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments.bench_engine_setup import QUIET, Bench, Found
from experiments.load import LoadPlan, open_streams, run_closed
from experiments.load_cloud import CloudStream
from experiments.load_report import Tally, percentile_ms
from experiments.load_wire import connect
from experiments.processes import VerifierProcess, running_verifier
from experiments.results import judged

NUM_HEALTHY, THINK_S = 8, 0.005
NUM_DYING, NUM_IDLE = 8, 1000
IDLE_PROMPT_TOKENS = 12
TTL_S, SWEEP_S = 15.0, 1.0  # the verifier looks for expired sessions once a second
ON_TIME_S = {"stopped reading": 15.0, "died": 5.0, "idle": TTL_S + 2 * SWEEP_S}
STALL_WINDOW = 2048  # bytes after which nothing more is read
MAX_P99_RATIO = 2.0
# Sessions that expire are closed by nobody, so the store must hold them all.
FLAGS = (
    *("--session-idle-ttl-s", str(TTL_S), "--max-sessions", str(2 * NUM_IDLE)),
    *("--admin-listen", "127.0.0.1:0"),
)


@dataclass
class Gauges:
    """Reads the verifier's own counts from its admin port."""

    url: str

    async def read(self, name: str) -> int:
        text = await asyncio.to_thread(_fetch, f"{self.url}/metrics")
        for line in text.splitlines():
            if line.startswith(f"outrider_verifier_{name} "):
                return int(float(line.split()[1]))
        raise RuntimeError(f"no gauge {name} at {self.url}")

    async def wait_until(self, name: str, is_right: Callable[[int], bool], timeout_s: float) -> float:
        """Seconds until the gauge was right; infinite when it was not within `timeout_s`."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + timeout_s:
            if is_right(await self.read(name)):
                return time.perf_counter() - begin_s
            await asyncio.sleep(0.2)
        return float("inf")


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as reply:
        return str(reply.read().decode())


@dataclass
class Healthy:
    """Rounds of the sessions beside, by the window in which they ended."""

    tally: Tally
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)

    async def during(self, name: str, work: Awaitable[Any]) -> Any:
        begin_s = time.perf_counter()
        found = await work
        self.windows[name] = (begin_s, time.perf_counter())
        return found

    def p99_ms(self, name: str) -> float:
        begin_s, end_s = self.windows[name]
        return percentile_ms(
            sorted(r.latency_s for r in self.tally.rounds if begin_s <= r.end_s < end_s), 0.99
        )


def measure_dead_clients(bench: Bench) -> Found:
    """8 sessions go on while a generation is not read, 8 sessions are killed, and 1,000 lie idle."""
    with running_verifier(*QUIET, *FLAGS) as verifier:
        healthy, gone_s = asyncio.run(_run(bench, verifier))
    tally = healthy.tally
    assert not tally.num_mismatches and not tally.errors, (tally.mismatches, tally.errors)
    alone_ms = healthy.p99_ms("alone")
    p99_ms = {name: healthy.p99_ms(name) for name in healthy.windows}
    worst = max(("stopped reading", "died", "idle"), key=p99_ms.__getitem__)
    late = [name for name, limit_s in ON_TIME_S.items() if gone_s[name] > limit_s]
    gone = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in gone_s.items())
    measure = judged(
        "engine.dead_clients",
        f"others' p99 beside the worst of them ({worst}) : alone (A/A {p99_ms['again'] / alone_ms:.2f}); "
        f"gone after: {gone}",
        p99_ms[worst] / alone_ms,
        "ratio",
        (f"on time; <= {MAX_P99_RATIO:g}", lambda ratio: ratio <= MAX_P99_RATIO and not late),
    )
    return Found([measure], {"p99_ms": p99_ms, "gone_s": gone_s, "on_time_s": ON_TIME_S, "late": late})


async def _run(bench: Bench, verifier: VerifierProcess) -> tuple[Healthy, dict[str, float]]:
    gauges, healthy, is_over = Gauges(verifier.admin_url), Healthy(Tally()), asyncio.Event()
    plan, quiet_s = LoadPlan(NUM_HEALTHY, think_s=THINK_S), bench.pick(5.0, 1.0)
    gone_s: dict[str, float] = {}
    async with open_streams(verifier.address, bench.recording, plan, healthy.tally) as streams:
        rounds = [
            asyncio.create_task(run_closed(stream, THINK_S, healthy.tally, is_over.is_set))
            for stream in streams
        ]
        await asyncio.sleep(1.0)
        for name in ("alone", "again"):
            await healthy.during(name, asyncio.sleep(quiet_s))
        for name, work in (
            ("stopped reading", _stop_reading(verifier.address, bench, gauges)),
            ("died", _die(verifier.address, bench, gauges)),
            ("idle", _lie_idle(verifier.address, bench, gauges)),
        ):
            gone_s[name] = await healthy.during(name, work)
            bench.say(f"{name}: gone after {gone_s[name]:.1f} s")
        is_over.set()
        await asyncio.gather(*rounds)
    return healthy, gone_s


async def _stop_reading(address: str, bench: Bench, gauges: Gauges) -> float:
    """A long generation whose client takes 2 KB and no more; seconds until its stream is gone."""
    connection = await connect(address, STALL_WINDOW)
    stream = CloudStream(connection, bench.recording.sessions[0].prompt_ids)
    opening = await stream.open()
    stream.ask_to_generate(opening.opened, 3500)
    gone_s = await gauges.wait_until(
        "streams", lambda number: number <= NUM_HEALTHY, ON_TIME_S["stopped reading"]
    )
    connection.close()
    return gone_s


async def _die(address: str, bench: Bench, gauges: Gauges) -> float:
    """Another generator, killed with its rounds under way; seconds until its streams are gone."""
    command = [sys.executable, "-m", "experiments.load", "--address", address, "--closed"]
    flags = ["--recording", str(bench.recording_file), "--sessions", str(NUM_DYING), "--seconds", "60"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await gauges.wait_until("streams", lambda number: number >= NUM_HEALTHY + NUM_DYING, 30.0)
        await asyncio.sleep(0.5)
    finally:
        process.kill()
        process.wait()
    return await gauges.wait_until("streams", lambda number: number <= NUM_HEALTHY, ON_TIME_S["died"])


async def _lie_idle(address: str, bench: Bench, gauges: Gauges) -> float:
    """1,000 sessions opened and left; seconds from the last opening until only the others are held."""
    num_idle = bench.pick(NUM_IDLE, 100)
    connection = await connect(address)
    for group in _groups(num_idle, 50):
        streams = [
            CloudStream(connection, tuple(1 + (31 * number + i) % 7000 for i in range(IDLE_PROMPT_TOKENS)))
            for number in group
        ]
        await asyncio.gather(*(stream.open() for stream in streams))
    bench.say(f"{num_idle} idle sessions are open ({await gauges.read('sessions')} held)")
    gone_s = await gauges.wait_until(
        "sessions", lambda number: number <= NUM_HEALTHY, ON_TIME_S["idle"] + 5.0
    )
    connection.close()
    return gone_s


def _groups(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))
