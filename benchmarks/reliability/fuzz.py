"""`rel.frames`: mutated, reordered and random frames of three tenants, while a fourth one's texts are checked.

Frames are those of recorded sessions, so that some of each stream are valid where the mutation did not hit
them, and the session is anywhere when a bad one comes.
"""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from benchmarks.reliability.hostile import TENANT
from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.common import codec
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.types import CancelRequest, CloseRequest, GenerateRequest
from outrider.edge_client.session.session import new_session_id
from outrider.experiments.load.record import record_embedded
from outrider.experiments.load.recording import RecordedSession
from outrider.experiments.load.report import Tally
from outrider.experiments.load.stream import ReplayStream
from outrider.experiments.load.wire import StreamLost, connect
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.results import at_most, judged

TENANTS = ("one", "two", "three")
STREAMS_A_TENANT = 4
FRAMES_A_STREAM = 12
ANSWERS_S = 2.0  # for which a stream's answers are read
IDLE_TTL_S = 3.0
METHOD = "/outrider.v1.Verifier/Session"
_BAD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def mutated(chance: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Returns frames of one stream, some of them changed, moved, repeated, spliced, cut or random."""
    found = list(frames)
    for _ in range(chance.randint(1, 4)):
        place, other = chance.randrange(len(found)), chance.randrange(len(found))
        frame = bytearray(found[place])
        match chance.randrange(7):
            case 0 | 1:
                for _ in range(chance.randint(1, 3)):
                    frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8) if frame else 0
            case 2:
                del frame[chance.randrange(len(frame) + 1) :]
            case 3:
                frame[chance.randrange(len(frame) + 1) :] = found[other]
            case 4:
                found[other], frame = bytes(frame), bytearray(found[other])
            case 5:
                found.insert(other, bytes(frame))
            case 6:
                frame = bytearray(chance.randbytes(chance.randint(1, 200)))
        found[place] = bytes(frame) or b"\0"
    return found


def session_frames(chance: random.Random, session: RecordedSession) -> list[bytes]:
    """Returns a session's frames: its opening, some rounds, a generation and the end, under a fresh id."""
    rounds = session.requests()
    last = chance.randrange(len(rounds))
    generate = GenerateRequest(100, rounds[last][1], rounds[last][2], chance.randint(1, 20))
    requests = [
        session.opening(new_session_id()),
        *(request for request, _, _ in rounds[: last + 1][: FRAMES_A_STREAM - 4]),
        generate,
        CancelRequest(100),
        CloseRequest(),
    ]
    return [codec.encode_request(each).SerializeToString() for each in requests]


class _Attack:
    """Sends the frames of all tenants; counts what came back."""

    def __init__(self, address: str, sessions: Sequence[RecordedSession]) -> None:
        self.num_frames = 0
        self.answers: Counter[str] = Counter()
        self._address, self._sessions = address, sessions

    async def run(self, tenant: str, number: int, num_frames: int) -> None:
        """Sends at least `num_frames` on one stream after the other."""
        chance = random.Random(f"{tenant} {number}")
        async with grpc.aio.insecure_channel(self._address) as channel:
            call = channel.stream_stream(METHOD)
            num_sent = 0
            while num_sent < num_frames:
                frames = mutated(chance, session_frames(chance, chance.choice(self._sessions)))
                num_sent += len(frames)
                await self._stream(call(metadata=((TENANT, tenant),)), frames)
                self.num_frames += len(frames)

    async def _stream(self, call: Any, frames: Sequence[bytes]) -> None:
        try:
            async with asyncio.timeout(ANSWERS_S):
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
                while (answer := await call.read()) is not grpc.aio.EOF:
                    self._count(pb.SessionResponse.FromString(answer))
            self.answers[f"status {(await call.code()).name}"] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.answers[f"status {(await call.code()).name}"] += 1
        except TimeoutError:
            self.answers["cancelled here"] += 1
        finally:
            call.cancel()

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
    flags = (*QUIET, "--admin-listen", "127.0.0.1:0", "--session-idle-ttl-s", str(IDLE_TTL_S))
    with running_verifier(*flags) as verifier:
        sessions = record_embedded(verifier.address, num_sessions=6, num_rounds=8).sessions
        attack, tally = _Attack(verifier.address, sessions), Tally()
        for _ in range(num_parts):
            asyncio.run(_run_part(verifier.address, attack, sessions, tally, num_frames // num_parts))
            num_held = _blocks_held(verifier)
            settings.say(f"{attack.num_frames} frames: {dict(attack.answers)}; {num_held} blocks held")
            yield _found(verifier, attack, tally, num_held)


async def _run_part(
    address: str, attack: _Attack, sessions: Sequence[RecordedSession], tally: Tally, num_frames: int
) -> None:
    is_over = asyncio.Event()
    witnesses = [asyncio.create_task(_witness(address, each, tally, is_over)) for each in sessions[:2]]
    each = num_frames // (len(TENANTS) * STREAMS_A_TENANT)
    streams = [(tenant, number) for tenant in TENANTS for number in range(STREAMS_A_TENANT)]
    await asyncio.gather(*(attack.run(tenant, number, each) for tenant, number in streams))
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
