"""A verifier process under replayed drafts of the embedded pair, beside the same sessions cloud-only."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine.setup import QUIET, generate_load
from benchmarks.gpu_check.stage import NONE, Report, Setting
from outrider.experiments.load.cloud import CloudStream, decode_all
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.recording import RecordedSession, Recording
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_least

THINK_MS = {"0": 20, "50": 70}  # by the emulated round trip: drafting takes 20 ms
SESSIONS, JUDGED_SESSIONS = (16, 64, 1), 16  # first what most depends on
RUN_S, TOY_RUN_S = 3.0, 0.5
NUM_NEW = 96


def run(setting: Setting, report: Report) -> None:
    """Records once, then offers the recorded rounds to the same server by several sessions."""
    flags = (
        "--device",
        setting.device,
        "--kv-memory",
        setting.pick("4GiB", "64MiB"),
        "--max-queue-ms",
        "1000",
    )
    with running_verifier(*QUIET, *flags) as verifier, tempfile.TemporaryDirectory() as scratch:
        size = setting.pick({"num_sessions": 16, "num_rounds": 24}, {"num_sessions": 2, "num_rounds": 3})
        recording = record_embedded(verifier.address, **size)
        file = recording.save(Path(scratch) / "recording.jsonl")
        report.note(server_start_s=round(verifier.start_s, 1), dtype=recording.dtype)
        for num_sessions in setting.pick(SESSIONS, (2,)):
            if setting.seconds_left < 20 and not setting.is_rehearsal:
                report.skip(f"{num_sessions} sessions", "the stage's time is over")
                continue
            cloud_only = asyncio.run(cloud_tokens_per_s(setting, verifier.address, recording, num_sessions))
            what = f"tokens a second of {num_sessions} sessions,"
            report.figure(f"gpu.cloud_only.{num_sessions}", f"{what} cloud-only", cloud_only, "tokens/s")
            for round_trip, think_ms in setting.pick(THINK_MS, {"0": 20}).items():
                speed = _replay(
                    setting, report, verifier.address, file, recording, num_sessions, round_trip, think_ms
                )
                id = f"gpu.speculative.{num_sessions}.{round_trip}ms"
                report.figure(id, f"{what} {think_ms} ms between their rounds", speed, "tokens/s")
                if num_sessions == JUDGED_SESSIONS and round_trip == "0":
                    what_ratio = f"accepted tokens, speculative : cloud-only, {num_sessions} sessions"
                    report.figure("gpu.capacity", what_ratio, speed / cloud_only, "ratio", at_least(2.0))


def _replay(
    setting: Setting, report: Report, address: str, file: Path, recording: Recording, num_sessions: int,
    round_trip: str, think_ms: int,
) -> float:  # fmt: skip
    """Returns tokens a second; a verdict unlike the recorded one counts as a mistake in float32 alone."""
    seconds = str(setting.pick(RUN_S, TOY_RUN_S))
    flags = ("--closed", "--sessions", str(num_sessions), "--seconds", seconds, "--think-ms", str(think_ms))
    found = generate_load(address, file, *flags, "--warmup-s", setting.pick("1", "0.2"))
    name = f"{num_sessions}x{round_trip}ms"
    report.note(**{f"load_{name}": asdict(found)})
    wrong = found.num_mismatches + found.num_hung + sum(found.errors.values())
    what = f"verdicts unlike the recorded ones of {found.num_rounds}; p50 {found.p50_ms:g}, p99 {found.p99_ms:g} ms"
    report.check(
        f"gpu.verdicts.{name}", what, wrong, "rounds", NONE if recording.dtype == "float32" else None
    )
    return found.rounds_per_s * tokens_per_round(recording.sessions)


def tokens_per_round(sessions: Sequence[RecordedSession]) -> float:
    """Returns the mean number of tokens that a recorded round commits."""
    return statistics.mean(len(each.token_ids) for session in sessions for each in session.rounds)


async def cloud_tokens_per_s(
    setting: Setting, address: str, recording: Recording, num_sessions: int
) -> float:
    """Returns the tokens a second of all sessions together, decoded by the target alone."""
    connection, num_new = await connect(address), setting.pick(NUM_NEW, 4)
    sessions = [recording.sessions[i % len(recording.sessions)] for i in range(num_sessions)]
    streams = [CloudStream(connection, each.prompt_ids, each.sampling) for each in sessions]
    seconds = await decode_all(streams, num_new)
    connection.close()
    return num_sessions * num_new / seconds
