"""gRPC health and nothing else, on a port of its own, in plain text and without credentials.

For probes that speak neither TLS nor tokens: Kubernetes' own. Two services: "" while new sessions are taken
(ready), "live" while the engine runs (a verifier that drains is not to be restarted).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from outrider.cloud_verifier.rpc.health import MAX_CONNECTION_CALLS, HealthCalls, Status
from outrider.cloud_verifier.rpc.interceptor import ErrorInterceptor
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
        options = (("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS))
        self._server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=options)
        HealthCalls(self._status_of, has_watch=False).add_to(self._server)
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

    def _status_of(self, service: str) -> Status | None:
        if service not in (READY, LIVE):
            return None
        engine = self._engine
        is_well = engine.is_running and (service == LIVE or not engine.is_draining)
        return "SERVING" if is_well else "NOT_SERVING"
