"""A server on a machine with a GPU, and on one that lacks an optional package."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import grpc
import pytest
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.config import ServeConfig
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc

SESSION_ID = bytes(16)
METADATA = (("x-session-id", SESSION_ID.hex()),)


class WatchedBackend(FakeBackend):
    """Keeps the name of the thread of every forward."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.threads: list[str] = []

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        self.threads.append(threading.current_thread().name)
        return super().forward(items)


def decode(port: int, num_new: int = 8) -> list[int]:
    """Opens a session, decodes cloud-only, closes it."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = outrider_pb2_grpc.VerifierStub(channel)
        opening = pb.OpenRequest(
            session_id=SESSION_ID, token_ids=[5, 6, 7], num_prompt_tokens=3, ignore_eos=True
        )
        opened = stub.Open(opening, metadata=METADATA, timeout=20).opened
        request = pb.GenerateRequest(
            round_id=2, base_position=opened.position, base_hash=opened.hash, max_new_tokens=num_new
        )
        replies = list(stub.Generate(request, metadata=METADATA, timeout=20))
        return [token_id for reply in replies for token_id in reply.tokens.token_ids]


def test_the_event_loop_never_waits_for_a_gpu() -> None:
    backend = WatchedBackend("cuda")
    with serving(backend, ServeConfig()) as server:
        assert len(decode(server.port)) == 8
    assert len(backend.threads) > 8 and set(backend.threads) == {"engine_0"}
    on_cpu = WatchedBackend("cpu")
    with serving(on_cpu, ServeConfig()) as server:
        decode(server.port)
    assert set(on_cpu.threads) - {"engine_0"}, "short steps of a CPU run on the loop"


def test_without_the_package_of_health_checks_the_verifier_serves_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    with serving(FakeBackend(), ServeConfig()) as server:
        assert len(decode(server.port)) == 8
    assert "grpcio-health-checking is missing" in caplog.text
