"""gRPC health on the serving port. A verifier without grpcio-health-checking serves all the same, and warns."""

from __future__ import annotations

import logging
from typing import Any, Literal

log = logging.getLogger(__name__)

HEALTH_SERVICE_NAME = "grpc.health.v1.Health"


class Health:
    """Answers health checks of the whole server ("") and of one service."""

    def __init__(self, service: str) -> None:
        self._services = ("", service)
        self._servicer: Any = None
        try:
            from grpc_health.v1 import health
        except ModuleNotFoundError:
            log.warning("no health checks: grpcio-health-checking is missing; pip install 'outrider[cloud]'")
        else:
            self._servicer = health.aio.HealthServicer()

    def add_to(self, server: Any) -> None:
        """Registers the service with a grpc.aio server."""
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, status: Literal["SERVING", "NOT_SERVING"]) -> None:
        """Answers with `status` from now on."""
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2

            for service in self._services:
                await self._servicer.set(service, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
