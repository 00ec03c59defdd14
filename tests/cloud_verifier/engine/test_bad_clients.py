"""Clients that do not read or die, and a verifier that shuts down: over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import eventually
from support.fakes import GatedBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.alignment import TokenChain
from outrider.common.errors import LinkError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.edge_client.transport.link.channel import translate
from tests.cloud_verifier.rpc.test_service import Stream, opening, round_after

NUM_UNREAD = 1000  # answers, far less than `--max-unread-bytes`
FIRST_HASH = TokenChain((5, 6, 7)).hash  # of an opening's prompt


def metadata_of(name: int) -> tuple[tuple[str, str], ...]:
    return (("x-session-id", (bytes([name]) * 16).hex()),)


def open_stream(channel: grpc.Channel, name: int) -> tuple[Stream, pb.Opened]:
    stream = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(name))
    return stream, stream.ask(open=opening(session_id=bytes([name]) * 16)).open.opened


def begin_a_forward(backend: GatedBackend, stream: Stream, request: pb.VerifyRequest) -> None:
    """The forward of `request` waits at the gate."""
    backend.gate.clear()
    num_begun = backend.num_begun
    stream.say(verify=request)
    assert eventually(lambda: backend.num_begun > num_begun)


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait at a gate here, whatever those before them took."""
    monkeypatch.setattr("outrider.cloud_verifier.engine.driver.INLINE_S", -1.0)


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def server(backend: GatedBackend) -> Iterator[VerifierServer]:
    with serving(backend, ServeConfig(max_queue_tokens=1, max_unread_bytes=4096)) as server:
        yield server
        backend.gate.set()


@pytest.fixture
def channel(server: VerifierServer) -> Iterator[grpc.Channel]:
    # Without the probe a client's transport takes 64 KB for a reader that does not read, and not some MB.
    options = (("grpc.http2.bdp_probe", 0),)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        yield channel


def test_a_refusal_does_not_wait_for_the_forward_that_runs(
    channel: grpc.Channel, backend: GatedBackend
) -> None:
    (first, opened), (second, opened_too) = open_stream(channel, 1), open_stream(channel, 2)
    begin_a_forward(backend, first, round_after(opened, draft_tokens=[1, 2]))
    for round_id in (1, 1, 2):
        error = second.ask(verify=round_after(opened_too, round_id)).verify.error
        assert error.code == pb.ROUND_ERROR_CODE_REFUSED and error.round_id == round_id
        assert error.retry_after_ms >= 20
    backend.gate.set()
    assert first.hear().verify.verdict.position > 4
    assert second.ask(verify=round_after(opened_too)).verify.verdict.position == 5


def test_a_refused_stream_is_answered_by_the_same_rules_once_there_is_room(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend
) -> None:
    (first, opened), (second, opened_too) = open_stream(channel, 1), open_stream(channel, 2)
    begin_a_forward(backend, first, round_after(opened, draft_tokens=[1, 2]))
    wrong = {"draft_tokens": [1], "q_token_probs": [2.0]}
    errors = [
        second.ask(verify=round_after(opened_too, round_id, **fields)).verify.error
        for round_id, fields in ((1, {}), (2, {}))
    ]
    assert {error.code for error in errors} == {pb.ROUND_ERROR_CODE_REFUSED}
    assert len({(error.message, error.retry_after_ms) for error in errors}) == 1
    assert server.engine.observer.errors["refused"] == sum(server.engine.backlog.num_refused.values()) == 2
    error = second.ask(verify=round_after(opened_too, 3, **wrong)).verify.error
    assert (error.code, error.field) == (pb.ROUND_ERROR_CODE_INVALID, "q_token_probs"), "room or none"
    backend.gate.set()
    assert first.hear().verify.verdict.position > 4
    assert second.ask(verify=round_after(opened_too, 3)).verify.verdict.position == 5


def test_a_client_that_does_not_read_is_cut_off_and_its_generation_ends(
    server: VerifierServer, channel: grpc.Channel
) -> None:
    stream, opened = open_stream(channel, 1)
    stream.say(
        generate=pb.GenerateRequest(
            round_id=1, base_position=opened.position, base_hash=opened.hash, max_new_tokens=90_000
        )
    )
    assert eventually(lambda: server.service.num_streams == 0)
    num_steps = server.engine.num_steps
    assert num_steps < 50_000
    other, opened_too = open_stream(channel, 2)
    assert other.ask(verify=round_after(opened_too)).verify.verdict.position == 5
    assert server.engine.num_steps <= num_steps + 3, "the generation went on"
    with pytest.raises(grpc.RpcError) as raised:
        for _ in stream.call:
            pass
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "not read" in raised.value.details()
    assert server._entrance.ended_calls.num_ended["unread"] == 1
    at_the_edge = translate(raised.value, "here")
    assert isinstance(at_the_edge, LinkError), "after which it connects again"
    assert "not read" in str(at_the_edge)
    again = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(1))
    assert again.ask(open=opening(session_id=bytes([1]) * 16)).open.opened.position == 4, "the session stayed"


def test_a_unary_generation_that_nobody_reads_ends_too(server: VerifierServer, channel: grpc.Channel) -> None:
    _, opened = open_stream(channel, 1)
    call = outrider_pb2_grpc.VerifierStub(channel).Generate(
        pb.GenerateRequest(
            round_id=1, base_position=opened.position, base_hash=opened.hash, max_new_tokens=90_000
        ),
        metadata=metadata_of(1),
    )
    next(call)
    assert eventually(lambda: server.engine.num_jobs == 0)
    assert server.engine.num_steps < 50_000
    assert eventually(
        lambda: server.service.num_calls == 1
    )  # the stream: the call is over, though nobody reads
    with pytest.raises(grpc.RpcError) as raised:
        for _ in call:
            pass
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.contextmanager
def answered_and_unread(backend: GatedBackend) -> Iterator[tuple[VerifierServer, grpc.Channel, Any]]:
    """A unary generation that is over, of which its client has read the first answer alone, and may leave the rest
    unread."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1))  # a window that is soon full
    with serving(backend) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        stub = outrider_pb2_grpc.VerifierStub(channel)
        opened = stub.Open(opening(num_logprobs=20)).opened
        call = stub.Generate(
            pb.GenerateRequest(
                session_id=opening().session_id,
                round_id=1,
                base_position=opened.position,
                base_hash=opened.hash,
                max_new_tokens=NUM_UNREAD,
            )
        )
        assert next(call).tokens.token_ids
        assert eventually(lambda: server.engine.num_jobs == 0)
        yield server, channel, call


def test_a_unary_generation_that_is_answered_and_not_read_is_cut_off_as_a_silent_stream_is(
    backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answered_and_unread(backend) as (server, _, call):
        assert server.service.num_calls == 1, "all was written: its client has room"
        monkeypatch.setattr("outrider.cloud_verifier.rpc.service.SILENT_S", 0.1)
        assert eventually(lambda: server.service.num_calls == 0, 20.0), "a drain would wait for it"
        assert not server.service.occupancy.calls
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE and "idle" in raised.value.details()
        assert server._entrance.ended_calls.num_ended["idle"] == 1


def test_a_unary_generation_that_is_read_slowly_is_not_idle(backend: GatedBackend) -> None:
    with answered_and_unread(backend) as (server, _, call):
        (generation,) = server.service._generations
        num_read, answered_s = 1, generation.last_used_s
        while num_read < NUM_UNREAD:
            next(call)
            num_read += 1
            if generation.last_used_s > answered_s:
                break
        assert num_read < NUM_UNREAD, "what was written last says when it was used"
        assert num_read + sum(1 for _ in call) == NUM_UNREAD


def test_the_second_of_two_generations_ends_with_its_stream_too(backend: GatedBackend) -> None:
    with serving(backend) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stream, _ = open_stream(channel, 1)
        for round_id in (1, 2):
            generate = pb.GenerateRequest(
                round_id=round_id, base_position=3, base_hash=FIRST_HASH, max_new_tokens=90_000
            )
            stream.say(generate=generate)
            while stream.hear().generate.tokens.round_id != round_id:
                pass
        stream.call.cancel()
        assert eventually(lambda: server.service.num_calls == 0)
        assert eventually(lambda: server.engine.num_jobs == 0)
        assert server.engine.num_steps < 50_000


def test_a_client_that_dies_in_mid_round_holds_nobody_and_its_session_stays(
    server: VerifierServer, channel: grpc.Channel, backend: GatedBackend
) -> None:
    (dying, opened), (other, opened_too) = open_stream(channel, 1), open_stream(channel, 2)
    begin_a_forward(backend, dying, round_after(opened, draft_tokens=[1]))
    dying.call.cancel()
    assert eventually(lambda: server.service.num_streams == 1)
    backend.gate.set()
    assert eventually(lambda: server.engine.num_jobs == 0)
    assert other.ask(verify=round_after(opened_too)).verify.verdict.position == 5
    replay = Stream(outrider_pb2_grpc.VerifierStub(channel), metadata_of(1))
    assert replay.ask(verify=round_after(opened, draft_tokens=[1])).verify.verdict.round_id == 1


# ---------------------------------------------------------------------------------------- shutting down


async def drained(backend: GatedBackend, grace_s: float) -> list[object]:
    """A round is in flight when the drain begins, with a unary one beside it; what their clients see."""
    config = ServeConfig(listen="127.0.0.1:0", admin_listen="none", drain_grace_s=grace_s, max_queue_ms=1e4)
    seen: list[object] = []
    async with VerifierServer(backend, config) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = outrider_pb2_grpc.VerifierStub(channel)
            call = stub.Session(metadata=metadata_of(1))
            await call.write(pb.SessionRequest(open=opening(session_id=bytes([1]) * 16)))
            opened = (await call.read()).open.opened
            unary = (await stub.Open(opening(session_id=bytes([2]) * 16), metadata=metadata_of(2))).opened
            backend.gate.clear()
            num_begun = backend.num_begun
            await call.write(pb.SessionRequest(verify=round_after(opened, draft_tokens=[1, 2])))
            request = round_after(unary, session_id=bytes([2]) * 16)
            pending = asyncio.ensure_future(stub.Verify(request, metadata=metadata_of(2)))
            while backend.num_begun == num_begun or server.engine.num_jobs < 2:
                await asyncio.sleep(0.01)
            drain = asyncio.create_task(server.drain())
            seen.append(await call.read())
            health = health_pb2_grpc.HealthStub(channel)
            seen.append((await health.Check(health_pb2.HealthCheckRequest())).status)
            asyncio.get_running_loop().call_later(0.3, backend.gate.set)
            seen.append(await call.read())
            seen.append(await pending)
            seen.append(await call.code())
            await drain
    return seen


@pytest.mark.parametrize("grace_s", [0.0, 0.5])
def test_a_drain_tells_and_answers_every_round_in_flight_before_it_ends_the_stream(
    backend: GatedBackend, grace_s: float
) -> None:
    draining, status, reply, unary, code = asyncio.run(drained(backend, grace_s))
    assert isinstance(draining, pb.SessionResponse) and draining.WhichOneof("body") == "draining"
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert isinstance(reply, pb.SessionResponse) and reply.verify.verdict.position >= 5
    assert isinstance(unary, pb.VerifyResponse) and unary.verdict.position == 5
    assert code is grpc.StatusCode.UNAVAILABLE


def test_a_drain_ends_a_unary_generation_with_what_it_has(backend: GatedBackend) -> None:
    async def last_of_drained() -> pb.GenerateResponse:
        config = ServeConfig(listen="127.0.0.1:0", admin_listen="none", drain_grace_s=0.0)
        async with VerifierServer(backend, config) as server:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub = outrider_pb2_grpc.VerifierStub(channel)
                opened = (await stub.Open(opening())).opened
                request = pb.GenerateRequest(
                    session_id=opening().session_id,
                    round_id=1,
                    base_position=opened.position,
                    base_hash=opened.hash,
                    max_new_tokens=90_000,
                )
                answers = stub.Generate(request)
                answer = await answers.read()
                drain = asyncio.create_task(server.drain())
                while not answer.tokens.is_last:
                    answer = await answers.read()
                await drain
        return answer

    assert asyncio.run(last_of_drained()).tokens.is_last
