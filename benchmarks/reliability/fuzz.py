"""`rel.frames`: mutated, reordered and random frames of three tenants, while a fourth one's texts are checked."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from benchmarks.reliability.frames import FrameSource
from benchmarks.reliability.hostile import TENANT
from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import ModelInfo
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Tally
from outrider.experiments.load.stream import ReplayStream
from outrider.experiments.load.wire import StreamLost, connect
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.results import at_most, judged
from outrider.models import shipped_heads

TENANTS = ("one", "two", "three")
SESSIONS_A_TENANT = 4
ANSWER_S, PATIENT_SHARE = 0.2, 0.8  # of the frames wait as long for an answer: the others are sent after them
ANSWERS_S = 2.0  # for which a stream's answers are read
IDLE_TTL_S = 3.0
METHOD = "/outrider.v1.Verifier/Session"
# grpc.aio's own words, under INTERNAL, for a write after the verifier ended the stream (`set_internal_error`).
_WRITE_FAILED = "Internal error from Core"
_BAD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class _Attack:
    """Sends the frames of all tenants; counts what came back."""

    def __init__(self, address: str, model: ModelInfo) -> None:
        self.num_frames = 0
        self.answers: Counter[str] = Counter()
        self._address, self._model = address, model

    async def run(self, tenant: str, name: str, num_frames: int) -> None:
        """Sends at least `num_frames` of one session, on a fresh stream where the verifier ended the last."""
        rng, model = random.Random(f"{tenant} {name}"), self._model
        source = FrameSource(
            rng,
            rng.randbytes(16),
            model.num_tokens,
            model.limits.max_context,
            model.methods,
            ("", *model.draft_sources),
        )
        metadata = (("x-session-id", source.session_id.hex()), (TENANT, tenant))
        num_sent = 0
        async with grpc.aio.insecure_channel(self._address) as channel:
            while num_sent < num_frames:
                call = channel.stream_stream(METHOD)(metadata=metadata)
                answered = asyncio.Event()
                reading = asyncio.create_task(self._read(call, source, answered))
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    while num_sent < num_frames and not reading.done():
                        for frame in source.next():
                            await call.write(frame)
                            num_sent, self.num_frames = num_sent + 1, self.num_frames + 1
                        answered.clear()
                        if rng.random() < PATIENT_SHARE:
                            with contextlib.suppress(TimeoutError):
                                await asyncio.wait_for(answered.wait(), ANSWER_S)
                    await call.done_writing()
                await asyncio.wait((reading,), timeout=ANSWERS_S)
                call.cancel()

    async def _read(self, call: Any, source: FrameSource, answered: asyncio.Event) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (data := await call.read()) is not grpc.aio.EOF:
                answer = pb.SessionResponse.FromString(data)
                source.hear(answer)
                self._count(answer)
                answered.set()
        answered.set()
        is_own = await call.details() == _WRITE_FAILED
        self.answers["write failed" if is_own else f"status {(await call.code()).name}"] += 1

    def _count(self, answer: pb.SessionResponse) -> None:
        body = answer.WhichOneof("body")
        kind = getattr(answer, body).WhichOneof("body") if body in ("open", "verify", "generate") else None
        if kind == "error":
            code = pb.RoundErrorCode.Name(getattr(answer, body).error.code)
            kind = code.removeprefix("ROUND_ERROR_CODE_")
        self.answers[kind or str(body)] += 1

    @property
    def num_internal(self) -> int:
        """Returns how many answers or calls were errors of the verifier's own."""
        return self.answers["INTERNAL"] + sum(self.answers[f"status {code.name}"] for code in _BAD)


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found, several times in the long form."""
    num_frames, num_parts = settings.pick((100_000, 10), (6_000, 1), (300, 1))
    sources = ("--lookahead", *(flag for each in shipped_heads() for flag in ("--heads", str(each))))
    flags = (*QUIET, *sources, "--admin-listen", "127.0.0.1:0", "--session-idle-ttl-s", str(IDLE_TTL_S))
    with running_verifier(*flags) as verifier:
        sessions = record_embedded(verifier.address, num_sessions=6, num_rounds=8).sessions
        model = GrpcLink(verifier.address, new_session_id()).describe(ANSWERS_S)
        attack, tally = _Attack(verifier.address, model), Tally()
        for part in range(num_parts):
            each = frames_of_session(num_frames, num_parts)
            asyncio.run(_run_part(verifier.address, attack, sessions, tally, part, each))
            num_held = _blocks_held(verifier)
            settings.say(f"{attack.num_frames} frames: {dict(attack.answers)}; {num_held} blocks held")
            yield _found(verifier, attack, tally, num_held)


def frames_of_session(num_frames: int, num_parts: int) -> int:
    """Returns how many frames each session sends in a part, for at least `num_frames` in all."""
    return math.ceil(num_frames / (num_parts * len(TENANTS) * SESSIONS_A_TENANT))


async def _run_part(
    address: str,
    attack: _Attack,
    sessions: Sequence[RecordedSession],
    tally: Tally,
    part: int,
    num_frames: int,
) -> None:
    is_over = asyncio.Event()
    witnesses = [asyncio.create_task(_witness(address, each, tally, is_over)) for each in sessions[:2]]
    names = [(tenant, f"{part} {number}") for tenant in TENANTS for number in range(SESSIONS_A_TENANT)]
    await asyncio.gather(*(attack.run(tenant, name, num_frames) for tenant, name in names))
    is_over.set()
    await asyncio.gather(*witnesses)


async def _witness(address: str, session: RecordedSession, tally: Tally, is_over: asyncio.Event) -> None:
    connection = await connect(address)
    try:
        stream = ReplayStream(connection, session, tally, metadata=[(TENANT, "witness")])
        await stream.open()
        while not is_over.is_set():
            await stream.round_at_last()
        await stream.close()
    except StreamLost as error:
        tally.note_mismatch(f"a witness lost its stream: {error}")
    connection.close()


def _blocks_held(verifier: VerifierProcess) -> int:
    """Returns the KV blocks that are in use once every session has expired; -1 where nobody answers."""
    name, num_held = 'outrider_verifier_kv_blocks{state="used"}', -1
    end_s = time.monotonic() + 4 * IDLE_TTL_S
    while num_held and time.monotonic() < end_s and verifier.process.poll() is None:
        time.sleep(0.3)
        with urllib.request.urlopen(f"{verifier.admin_url}/metrics", timeout=10.0) as reply:
            lines = reply.read().decode().splitlines()
        num_held = int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))
    return num_held


def _found(verifier: VerifierProcess, attack: _Attack, tally: Tally, num_held: int) -> Found:
    num_crashes = int(verifier.process.poll() is not None)
    parts = (num_crashes, attack.num_internal, tally.num_mismatches, abs(num_held))
    measure = judged(
        "rel.frames",
        f"after {attack.num_frames} mutated frames of {len(TENANTS)} tenants: {parts[0]} crashes + {parts[1]} INTERNAL "
        f"+ {parts[2]} of {len(tally.rounds)} witness rounds that differ + {parts[3]} blocks held",
        sum(parts),
        "faults",
        at_most(0),
    )
    return [measure], {"answers": dict(attack.answers), "mismatches": tally.mismatches}
