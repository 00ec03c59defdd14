"""The port for Kubernetes' probes: whether the verifier serves and lives, in plain text, and nothing else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import plain_channel
from support.dev_security import make_dev_security
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.addresses import check_addresses
from outrider.common.errors import UsageError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc


def test_probes_are_answered_without_tls_and_token_and_tell_a_drain_from_a_death(tmp_path: Path) -> None:
    settings = {key: Path(value) for key, value in make_dev_security(tmp_path).serve_settings.items()}
    config = ServeConfig(probe_listen="127.0.0.1:0", **settings)  # type: ignore[arg-type]
    with serving(FakeBackend(), config) as server:
        assert server.probes is not None
        with plain_channel(server.probes.port) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            def ask(service: str) -> str:
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

            assert (ask(""), ask("live")) == ("SERVING", "SERVING")
            server.engine.is_draining = True
            assert (ask(""), ask("live")) == ("NOT_SERVING", "SERVING")
            server.engine.is_running = False
            assert (ask(""), ask("live")) == ("NOT_SERVING", "NOT_SERVING")
            server.engine.is_running = True
            with pytest.raises(grpc.RpcError) as unknown:
                ask("else")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            with pytest.raises(grpc.RpcError) as other:
                outrider_pb2_grpc.VerifierStub(channel).Describe(pb.DescribeRequest(), timeout=60)
            assert other.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_malformed_probe_address_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match="--probe-listen nowhere: want HOST:PORT"):
        check_addresses(ServeConfig(probe_listen="nowhere"))
