"""gRPC health and nothing else, on a port of its own, in plain text and without credentials.

For probes that speak neither TLS nor tokens: Kubernetes' own. Two services: "" while new sessions are taken
(ready), "live" while the engine runs (a verifier that drains is not to be restarted).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.common.errors import UsageError

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.engine import Engine

READY, LIVE = "", "live"


class ProbePort:
    """Answers gRPC health checks on a port of its own."""

    def __init__(self, listen: str, engine: Engine) -> None:
        self.port = 0
        self._listen = listen
        self._engine = engine
        self._server: Any = None

    async def open(self) -> None:
        """Binds and serves on the running event loop. Raises `UsageError` where it cannot bind."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self._engine), self._server)
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise UsageError(
                f"--probe-listen {self._listen}: cannot bind; is another process there?"
            ) from error
        await self._server.start()

    async def close(self) -> None:
        """Stops at once."""
        await self._server.stop(grace=None)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in (READY, LIVE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"want {READY!r} or {LIVE!r}")
        is_well = self._engine.is_running and (request.service == LIVE or not self._engine.is_draining)
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if is_well else status.NOT_SERVING)
