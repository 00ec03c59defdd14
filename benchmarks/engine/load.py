"""Measures too much load, and many short sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine.setup import QUIET, Bench, generate_load, pinned
from benchmarks.results_file import Found
from outrider.experiments.load.report import LoadReport, Tally
from outrider.experiments.load.stream import ReplayStream
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import Measure, at_least, judged

VERIFIER_CORE, GENERATOR_CORE = 0, 1
POOL = 256  # sessions the open loop draws from: more than can be under way at once
SWEEP = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the closed loop's rate
OVERLOAD = 10
# Memory settles in the first 800 cycles: the KV pool's pages, the allocators' arenas, the prefix cache.
NUM_CYCLES, WARMUP_CYCLES, CYCLES_A_SAMPLE = 2000, 1000, 50
MAX_KIB_A_CYCLE = 0.5
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


# ------------------------------------------------------------------------------------------- overload


def measure_overload(bench: Bench) -> Found:
    """Offers more and more rounds: torch on one thread and core, the generator on the other; a round is in
    time within 400 ms.

    Capacity is the best goodput of a sweep of open-loop rates; 1x and 10x are multiples of it.
    """
    with contextlib.ExitStack() as stack:
        with pinned(VERIFIER_CORE):
            flags = ("--num-threads", "1")
            verifier = stack.enter_context(running_verifier(*QUIET, *flags))

        def offer(rate: float, seconds: float) -> LoadReport:
            flags = ("--rate", f"{rate:.1f}", "--sessions", str(POOL), "--seconds", str(seconds))
            report = generate_load(verifier.address, bench.recording_file, *flags, core=GENERATOR_CORE)
            bench.say(
                f"{rate:.0f} a second offered: {report.goodput:.0f} in time, p99 {report.p99_ms:.0f} ms; "
                f"refused {report.num_refused} (p99 {report.refused_p99_ms:.1f} ms), hung {report.num_hung}"
            )
            return report

        closed = generate_load(
            verifier.address,
            bench.recording_file,
            *("--closed", "--sessions", "64", "--seconds", str(bench.pick(5.0, 1.0))),
            core=GENERATOR_CORE,
        )
        rates = [share * closed.rounds_per_s for share in bench.pick(SWEEP, (1.0,))]
        sweep = [offer(rate, bench.pick(8.0, 1.0)) for rate in rates]
        peak = max(report.goodput for report in sweep)
        once = offer(peak, bench.pick(15.0, 1.0))
        flood = offer(OVERLOAD * peak, bench.pick(30.0, 2.0))
    named = {"closed": closed, "1x": once, "10x": flood}
    details = {name: asdict(report) for name, report in named.items()}
    return (_judge_overload(peak, once, flood), {**details, "sweep": [asdict(r) for r in sweep]})


def _judge_overload(peak: float, once: LoadReport, flood: LoadReport) -> list[Measure]:
    is_fair = (
        flood.refused_p99_ms <= 50
        and flood.num_refused_without_hint == 0
        and flood.num_hung == 0
        and not flood.errors
        and flood.num_mismatches == 0
    )
    return [
        judged(
            "engine.overload_goodput",
            f"goodput at 10x capacity : peak ({peak:.0f} rounds/s); generator late by "
            f"{flood.lag_p99_ms:.1f} ms p99, {flood.num_unsent} arrivals found no free session",
            flood.goodput / peak,
            "ratio",
            at_least(0.9),
        ),
        judged(
            "engine.overload_p99",
            f"accepted p99 at 10x : at 1x; {flood.num_refused} refused, p99 {flood.refused_p99_ms:.1f} ms, "
            f"{flood.num_refused_without_hint} without a hint, {flood.num_hung} hung",
            flood.p99_ms / once.p99_ms if once.p99_ms else 0.0,
            "ratio",
            ("<= 2; <= 50 ms", lambda ratio: 0 < ratio <= 2 and is_fair),
        ),
    ]


# ----------------------------------------------------------------------------------------------- leak


def measure_leak(bench: Bench) -> Found:
    """Runs sessions of one round each, four at a time, and reads the verifier's resident memory as they
    go."""
    num_cycles = bench.pick(NUM_CYCLES, 100)
    warmup = bench.pick(WARMUP_CYCLES, 50)
    # A small pool: what a larger one touches for the first time would look like a leak.
    with running_verifier(*QUIET, "--kv-memory", "48MiB") as verifier:
        pid = verifier.process.pid
        tally, samples = Tally(), []
        samples = asyncio.run(_cycle(bench, verifier.address, pid, tally, warmup + num_cycles))
    assert not tally.num_mismatches, tally.mismatches
    settled = [(cycle, kib) for cycle, kib in samples if cycle >= warmup]
    slope = statistics.linear_regression([c for c, _ in settled], [kib for _, kib in settled]).slope
    measure = judged(
        "engine.leak",
        f"resident memory slope over {num_cycles} open-verify-close cycles, KiB a cycle "
        f"({settled[0][1] / 1024:.1f} MiB before, {settled[-1][1] / 1024:.1f} after)",
        slope,
        "KiB",
        (f"flat: <= {MAX_KIB_A_CYCLE:g}", lambda value: value <= MAX_KIB_A_CYCLE),
    )
    return ([measure], {"rss_mib": [(cycle, round(kib / 1024, 2)) for cycle, kib in samples]})


async def _cycle(
    bench: Bench, address: str, pid: int, tally: Tally, num_cycles: int
) -> list[tuple[int, float]]:
    sessions = sorted(bench.recording.sessions, key=lambda s: len(s.prompt_ids))[:8]
    connection, samples = await connect(address), [(0, _resident_kib(pid))]
    started = 0

    async def work() -> None:
        nonlocal started
        while started < num_cycles:
            started += 1
            number = started
            stream = ReplayStream(connection, sessions[number % len(sessions)], tally)
            await stream.open()
            await stream.round()
            await stream.close()
            if number % CYCLES_A_SAMPLE == 0:
                samples.append((number, _resident_kib(pid)))
            if number % 500 == 0:
                bench.say(f"cycle {number} of {num_cycles}: {_resident_kib(pid) / 1024:.1f} MiB")

    await asyncio.gather(*(work() for _ in range(4)))
    connection.close()
    return samples


def _resident_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB
