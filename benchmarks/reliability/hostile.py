"""`rel.hostile`: rounds of one tenant beside each abuse of `abuses.py`, against those beside an honest busy tenant.

The verifier has one core, everybody else the other, where whoever abuses is nice. The tenant's rounds are
recorded ones, so that its verdicts are checked as well; a round lasts until its verdict, refusals included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from benchmarks.engine.setup import pinned
from benchmarks.reliability.abuses import ABUSES, Abuser, busy
from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Tally, percentile_ms
from outrider.experiments.load.stream import ReplayStream
from outrider.experiments.load.wire import StreamLost, connect
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import judged

BUSY = {"busy": busy, "busy_again": busy}
SMOKE = ("busy", "busy_again", "bad_words", "garbage")
VERIFIER_CORE, CLIENT_CORE = 0, 1
NUM_SESSIONS, THINK_S = 4, 0.005
MAX_RATIO = 1.5
START_S = 1.0  # from an abuser's first message until others are measured
TENANT = "x-outrider-tenant"


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found after each abuse."""
    seconds = settings.pick(20.0, 4.0, 1.0)
    found: dict[str, dict[str, float]] = {}
    tally = Tally()
    with contextlib.ExitStack() as stack:
        with pinned(VERIFIER_CORE):
            verifier = stack.enter_context(running_verifier(*QUIET, "--num-threads", "1"))
        sessions = record_embedded(verifier.address, num_sessions=NUM_SESSIONS, num_rounds=12).sessions
        with pinned(CLIENT_CORE), abusing(verifier.address, "busy"):  # to warm up
            measure(verifier.address, sessions, Tally(), START_S)
        for name in settings.pick((*BUSY, *ABUSES), (*BUSY, *ABUSES), SMOKE):
            with pinned(CLIENT_CORE), abusing(verifier.address, name):
                time.sleep(START_S)
                found[name] = measure(verifier.address, sessions, tally, seconds)
            settings.say(f"{name}: {found[name]}")
            yield _found(found, tally)


@contextmanager
def abusing(address: str, name: str) -> Iterator[None]:
    """Has a tenant of its own process do so, inside."""
    command = [sys.executable, "-m", "benchmarks.reliability.hostile", address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        try:
            yield
        finally:
            process.kill()


def measure(
    address: str, sessions: Sequence[RecordedSession], tally: Tally, seconds: float
) -> dict[str, float]:
    """Returns the figures of the other tenant's rounds, and adds to `tally` what they met."""
    return asyncio.run(_measure(address, sessions, tally, seconds))


async def _measure(
    address: str, sessions: Sequence[RecordedSession], tally: Tally, seconds: float
) -> dict[str, float]:
    connection, waits_s, num_before = await connect(address), [], len(tally.refusals)
    num_lost = 0

    async def replay(session: RecordedSession) -> None:
        nonlocal num_lost
        stream = ReplayStream(connection, session, tally, metadata=[(TENANT, "honest")])
        begin_s = start_s = time.perf_counter()
        try:
            await stream.open()
            while start_s < begin_s + seconds:
                start_s = time.perf_counter()
                await stream.round_at_last()
                waits_s.append(time.perf_counter() - start_s)
                await asyncio.sleep(THINK_S)
            await stream.close()
        except StreamLost:
            num_lost += 1

    async with asyncio.timeout(seconds + 60.0):
        await asyncio.gather(*map(replay, sessions))
    connection.close()
    waits_s.sort()
    return {
        "p50_ms": percentile_ms(waits_s, 0.5),
        "p99_ms": percentile_ms(waits_s, 0.99),
        "rounds": len(waits_s),
        "refused": len(tally.refusals) - num_before,
        "lost": num_lost,
    }


def _found(found: dict[str, dict[str, float]], tally: Tally) -> Found:
    p99_ms = {name: each["p99_ms"] for name, each in found.items()}
    honest_ms = p99_ms["busy"]
    abuses = [name for name in found if name not in BUSY]
    if not abuses:
        return [], {"beside": found}
    worst = max(abuses, key=p99_ms.__getitem__)
    again = p99_ms.get("busy_again", honest_ms) / honest_ms
    num_lost = int(sum(each["lost"] for each in found.values()))
    measure = judged(
        "rel.hostile",
        f"p99 of another tenant's round beside the worst of {len(abuses)} abuses ({worst}, {p99_ms[worst]:.0f} ms) : "
        f"beside an honest busy tenant's rounds of 64 drafts ({honest_ms:.0f} ms, A/A {again:.2f}); {num_lost} of its "
        f"sessions lost, {tally.num_mismatches} verdicts unlike the recording",
        p99_ms[worst] / honest_ms,
        "ratio",
        (f"<= {MAX_RATIO:g}", lambda ratio: ratio <= MAX_RATIO and not num_lost and not tally.num_mismatches),
    )
    return [measure], {"beside": found, "mismatches": tally.mismatches}


async def _abuse(address: str, name: str) -> None:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 1 << 26))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await (BUSY | ABUSES)[name](Abuser(channel, ((TENANT, "other"),), asyncio.Event()))


def main() -> None:
    """Runs one abuse until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.hostile", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("name", choices=(*BUSY, *ABUSES))
    given = parser.parse_args()
    os.nice(19)
    print("ready", flush=True)
    asyncio.run(_abuse(given.address, given.name))


if __name__ == "__main__":
    main()
