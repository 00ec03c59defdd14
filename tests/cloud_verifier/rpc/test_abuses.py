"""Every abuse of the hostile benchmark at once, beside a witness: its text and the verifier must not notice."""

from __future__ import annotations

import asyncio
import time

import grpc
from support.fakes import FakeBackend
from support.processes.server import serving
from test_service import Stream, opening

from benchmarks.reliability.abuses import ABUSES, Abuser
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc

NUM_TOKENS, MAX_CONTEXT, ABUSED_S = 600, 1000, 2.5
WITNESS = bytes(16)


def serve() -> FakeBackend:
    return FakeBackend(num_tokens=NUM_TOKENS, max_context=MAX_CONTEXT, kv_tokens=10_000)


def witness_text(port: int, until_s: float) -> list[tuple[int, int]]:
    """Returns positions and hashes after each of at least ten rounds, and until a time; refusals are retried."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        metadata = (("x-session-id", WITNESS.hex()), ("x-outrider-tenant", "witness"))
        stream = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata)
        reply = stream.ask(open=opening(session_id=WITNESS)).open.opened
        text, round_id = [(reply.position, reply.hash)], 1
        while len(text) < 10 or (time.monotonic() < until_s and len(text) < 100):
            base = {"base_position": reply.position, "base_hash": reply.hash}
            answer = stream.ask(
                verify=pb.VerifyRequest(round_id=round_id, draft_tokens=[1, 2], **base)
            ).verify
            if answer.WhichOneof("body") == "error":
                assert answer.error.code == pb.ROUND_ERROR_CODE_REFUSED, answer.error
                time.sleep(answer.error.retry_after_ms / 1000.0)
                continue
            reply, round_id = answer.verdict, round_id + 1
            text.append((reply.position, reply.hash))
        stream.call.cancel()
        return text


async def abuse(port: int) -> list[tuple[int, int]]:
    """Runs every abuse beside the witness; returns the witness's text."""
    until = asyncio.Event()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        metadata = (("x-outrider-tenant", "abuser"),)
        abuser = Abuser(
            channel, metadata, until, num_sessions=2, num_tokens=NUM_TOKENS, max_context=MAX_CONTEXT
        )
        abuses = [asyncio.create_task(each(abuser)) for each in ABUSES.values()]
        text = await asyncio.to_thread(witness_text, port, time.monotonic() + ABUSED_S)
        assert not [each for each in abuses if each.done()], "an abuse ended by itself"
        until.set()
        await asyncio.gather(*abuses)
    return text


def test_all_abuses_together_change_no_other_tenants_text_and_leave_nothing() -> None:
    with serving(serve()) as server:
        alone = witness_text(server.port, 0.0)
    config = ServeConfig(tenant_max_calls=64, max_sessions=32)
    with serving(serve(), config) as server:
        beside = asyncio.run(abuse(server.port))
        assert beside[: len(alone)] == alone[: len(beside)]
        errors = server.engine.observer.errors
        assert errors["internal"] == server.engine.observer.num_failed_steps == 0, errors
        assert is_settled(server), (server.service.occupancy.calls, server.service.occupancy.waiting_ids)
        server.engine.check_integrity()


def is_settled(server: VerifierServer) -> bool:
    """Returns whether all calls and requests of the abuser are counted out, in time."""
    end_s = time.monotonic() + 20.0
    while time.monotonic() < end_s:
        occupancy = server.service.occupancy
        if not (occupancy.calls or occupancy.waiting_ids or server.engine.num_jobs):
            return True
        time.sleep(0.05)
    return False
