"""A verifier that still loads its target: its port is bound, health says no, and calls say why."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import get_url
from support.fakes import FakeBackend

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.driver import EngineStoppedError
from outrider.cloud_verifier.server.entrance import Entrance
from outrider.cloud_verifier.server.server import VerifierServer, serve_until_signalled
from outrider.common.errors import LinkError, ModelError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.edge_client.transport.link.probe import probe

CONFIG = ServeConfig(listen="127.0.0.1:0", admin_listen="none")
PATHS = ("/healthz", "/readyz", "/metrics", "/version")
Status = health_pb2.HealthCheckResponse.ServingStatus


async def health_of(channel: grpc.aio.Channel) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return str(Status.Name(answer.status))


def assert_calls_are_refused(port: int) -> None:
    """By an edge's client: grpc.aio's says INTERNAL where the refusal comes while it writes or reads."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        describe = outrider_pb2_grpc.VerifierStub(channel).Describe.future(pb.DescribeRequest())
        session = outrider_pb2_grpc.VerifierStub(channel).Session(iter([pb.SessionRequest()]))
        for call in (describe, session):
            assert call.code() is grpc.StatusCode.UNAVAILABLE
            assert "loading the target" in call.details()
    with pytest.raises(LinkError, match="is loading the target") as told:
        probe(f"127.0.0.1:{port}")
    assert told.value.fix == "wait until it has loaded"


def test_until_the_target_is_loaded_health_says_no_and_calls_are_told_why() -> None:
    config = replace(CONFIG, admin_listen="127.0.0.1:0")
    entrance, may_load = Entrance(config), threading.Event()
    order: list[str] = []

    def load() -> VerifierServer:
        assert may_load.wait(60)
        order.append("loaded")
        return VerifierServer(FakeBackend(), config, entrance=entrance)

    def statuses() -> list[int]:
        assert entrance.admin is not None
        return [get_url(entrance.admin.url + path)[0] for path in PATHS]

    async def run() -> None:
        serving = asyncio.create_task(
            serve_until_signalled(entrance, load, lambda server: order.append("ready"))
        )
        while entrance.admin is None or not entrance.admin.port:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(statuses) == [200, 503, 503, 503]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{entrance.port}") as channel:
            stub = outrider_pb2_grpc.VerifierStub(channel)
            assert await health_of(channel) == "NOT_SERVING"
            await asyncio.to_thread(assert_calls_are_refused, entrance.port)
            os.kill(os.getpid(), signal.SIGHUP)  # a reload, which must not end what is loading
            assert await health_of(channel) == "NOT_SERVING"
            assert not order
            may_load.set()
            while "ready" not in order and not serving.done():
                await asyncio.sleep(0.01)
            assert await health_of(channel) == "SERVING"
            assert (await stub.Describe(pb.DescribeRequest())).model_id
            assert await asyncio.to_thread(statuses) == [200] * len(PATHS)
        serving.cancel()
        await asyncio.wait((serving,))

    asyncio.run(run())
    assert order == ["loaded", "ready"]


def test_a_target_that_does_not_load_ends_the_verifier_with_its_error() -> None:
    def load() -> VerifierServer:
        raise ModelError("no such weights")

    with pytest.raises(ModelError, match="no such weights"):
        asyncio.run(serve_until_signalled(Entrance(CONFIG), load, lambda server: None))


def test_a_signal_ends_a_verifier_that_still_loads() -> None:
    """As the first process of a container it would else get none, and serve once it has loaded."""
    is_over = threading.Event()

    def load() -> VerifierServer:
        os.kill(os.getpid(), signal.SIGTERM)
        is_over.wait(60)
        raise ModelError("loaded to the end")

    try:
        serving = serve_until_signalled(Entrance(CONFIG), load, lambda server: pytest.fail("it serves"))
        asyncio.run(asyncio.wait_for(serving, 30))
    finally:
        is_over.set()


def test_a_verifier_whose_engine_has_a_bug_ends_and_so_do_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> bool:
        raise RuntimeError("a bug")

    def load() -> VerifierServer:
        server = VerifierServer(FakeBackend(), CONFIG, entrance=entrance)
        monkeypatch.setattr(server.engine, "step", step)
        return server

    async def run() -> None:
        ready = asyncio.Event()
        serving = asyncio.create_task(serve_until_signalled(entrance, load, lambda server: ready.set()))
        await ready.wait()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{entrance.port}") as channel:
            opening = pb.OpenRequest(session_id=bytes(16), token_ids=[5], num_prompt_tokens=1)
            with pytest.raises(grpc.aio.AioRpcError):
                await outrider_pb2_grpc.VerifierStub(channel).Open(opening)
        with pytest.raises(EngineStoppedError, match="stopped for a bug"):
            await serving

    entrance = Entrance(CONFIG)
    asyncio.run(asyncio.wait_for(run(), 60))
