"""gRPC health, which everybody may ask: what it tells, and how much one client may hold of it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import eventually, plain_channel, status_of
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.rpc.health import MAX_CONNECTION_CALLS, Health
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.transport.link.channel import close_later, open_channel

Response = health_pb2.HealthCheckResponse
REQUEST = health_pb2.HealthCheckRequest()
SERVICE = "outrider.v1.Verifier"
MODULE = "outrider.cloud_verifier.rpc.health"


@pytest.fixture
def server() -> Iterator[VerifierServer]:
    with serving(FakeBackend()) as server:
        yield server


def watch(channel: grpc.Channel) -> Any:
    """Returns a watch that has told the status."""
    call = health_pb2_grpc.HealthStub(channel).Watch(REQUEST)
    assert next(call).status == Response.SERVING
    return call


def test_a_connection_has_a_bounded_number_of_watches_and_another_is_not_in_their_way(
    server: VerifierServer,
) -> None:
    with plain_channel(server.port) as loud, plain_channel(server.port) as quiet:
        watches = [watch(loud) for _ in range(MAX_CONNECTION_CALLS)]
        stub = health_pb2_grpc.HealthStub(loud)
        code, details = status_of(lambda: stub.Watch(REQUEST))
        # By which gRPC's own health checking takes the connection for one that can be used.
        assert code is grpc.StatusCode.UNIMPLEMENTED and "too many health watches" in details
        assert status_of(lambda: stub.Check(REQUEST))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        watch(quiet).cancel()
        assert health_pb2_grpc.HealthStub(quiet).Check(REQUEST).status == Response.SERVING
        for call in watches:
            call.cancel()
        calls = server._entrance.health.calls
        assert eventually(lambda: not calls.num_calls and not calls.num_watches)
        watch(loud)


def test_watches_of_all_connections_are_bounded_and_checks_go_on(
    server: VerifierServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.MAX_WATCHES", 1)
    with plain_channel(server.port) as first, plain_channel(server.port) as second:
        only = watch(first)
        stub = health_pb2_grpc.HealthStub(second)
        assert status_of(lambda: stub.Watch(REQUEST))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert stub.Check(REQUEST).status == Response.SERVING
        only.cancel()


def test_an_edge_of_several_verifiers_connects_where_there_is_no_watch_left(
    server: VerifierServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.MAX_WATCHES", 0)
    address = f"127.0.0.1:{server.port}"
    close_later(open_channel(f"{address},{address}", 20.0, session_id=bytes(16)))


def test_a_call_without_its_message_ends(server: VerifierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.SILENT_S", 0.05)
    with plain_channel(server.port) as channel:
        for name in ("Check", "Watch"):
            messages: queue.SimpleQueue[bytes | None] = (
                queue.SimpleQueue()
            )  # a call's own: its thread may read on
            call = channel.stream_stream(f"/grpc.health.v1.Health/{name}")(iter(messages.get, None))
            code, details = status_of(lambda call=call: call)  # type: ignore[misc]
            assert code is grpc.StatusCode.UNAVAILABLE and "has not come" in details
            messages.put(None)


class Context:
    """One call's, whose client reads or does not."""

    def __init__(self, name: str, service: str = "", *, reads: bool = True) -> None:
        self._name, self._service, self._reads = name, service, reads
        self.told: list[str] = []

    def peer(self) -> str:
        return self._name

    async def read(self) -> bytes:
        return bytes(health_pb2.HealthCheckRequest(service=self._service).SerializeToString())

    async def write(self, message: bytes) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        self.told.append(Response.ServingStatus.Name(Response.FromString(message).status))


def test_all_that_watch_are_told_whoever_left_before_or_does_not_read() -> None:
    async def run() -> None:
        health = Health(SERVICE)
        contexts = [
            Context("a"),
            Context("b", SERVICE),
            Context("c", "unknown"),
            Context("d", reads=False),
            Context("e"),
        ]
        tasks = [asyncio.create_task(health.calls._watch(None, context)) for context in contexts]
        await settled()
        health.set("SERVING")
        await settled()
        tasks[-1].cancel()
        await settled()
        health.set("SERVING")
        health.set("NOT_SERVING")
        await settled()
        told = ["NOT_SERVING", "SERVING", "NOT_SERVING"]
        assert [each.told for each in contexts] == [told, told, ["SERVICE_UNKNOWN"], [], told[:2]]
        assert health.calls.num_watches == 4
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not health.calls.num_watches and not health.calls.num_calls

    asyncio.run(run())


async def settled() -> None:
    """Lets every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)
