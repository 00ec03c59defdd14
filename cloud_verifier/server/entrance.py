"""The gRPC port and the admin port of a verifier, bound before its target is loaded.

Until then health answers NOT_SERVING, every other call UNAVAILABLE, "loading the target", and `/readyz` 503.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.rpc.ended_calls import EndedCalls
from outrider.cloud_verifier.rpc.health import HEALTH_SERVICE_NAME, Health
from outrider.cloud_verifier.rpc.interceptor import ErrorInterceptor
from outrider.cloud_verifier.rpc.service import SERVICE_NAME, VerifierService
from outrider.cloud_verifier.rpc.tracing import TraceContextInterceptor
from outrider.cloud_verifier.security.server_security import ServerSecurity
from outrider.cloud_verifier.server.addresses import check_addresses
from outrider.cloud_verifier.server.admin import AdminServer
from outrider.common.errors import UsageError
from outrider.common.process.tracing import find_tracer
from outrider.common.types import LOADING

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.engine import Engine

# Calls of one connection, of all kinds: more wait at their client. Twice what a tenant has open at most by default
# (--tenant-max-calls), where an edge has a few; it bounds what is open before it is counted.
MAX_CONNECTION_STREAMS = 1024


def server_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Returns gRPC's options of the port."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_STREAMS),
        ("grpc.so_reuseport", 0),
    )


class Entrance:
    """Answers on `port` from `open()` to `close()`, for a service from `admit()` on."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises `UsageError` and `ConfigError` for addresses, certificates or tokens that cannot be used."""
        self.port = 0
        self.security = ServerSecurity(config)
        self._config = config
        self._listen, admin_listen = check_addresses(config)
        self.health = Health(SERVICE_NAME)
        self.ended_calls = EndedCalls()
        self.admin: AdminServer | None = None
        if admin_listen is not None:
            self.admin = AdminServer(admin_listen, self.security, self.ended_calls)
        self._calls = _Calls()
        self._server: Any = None

    async def open(self) -> None:
        """Binds the ports, once, on the running event loop. Raises `UsageError` where one cannot be bound."""
        if self._server is not None:
            return
        tracing = () if find_tracer() is None else (TraceContextInterceptor(),)
        server = grpc.aio.server(
            handlers=(self._calls,),
            interceptors=(ErrorInterceptor(self.ended_calls), *self.security.interceptors, *tracing),
            options=server_options(self._config.max_message_bytes),
        )
        self.health.add_to(server)
        if self._config.reflection:
            _add_reflection(server)
        try:
            self.port = self.security.add_port(server, self._listen)
        except RuntimeError as error:
            await server.stop(grace=None)
            raise UsageError(f"--listen {self._listen}: cannot bind; is another process there?") from error
        await server.start()
        self._server = server
        if self.admin is not None:
            try:
                self.admin.open()
            except UsageError:
                await self.close()
                raise

    def admit(self, service: VerifierService, engine: Engine) -> None:
        """Hands calls to `service` from now on; the admin port answers of its engine."""
        self._calls.handler = service.make_handler()
        if self.admin is not None:
            self.admin.admit(engine, lambda: service.num_streams)
        self.health.set("SERVING")

    def refuse(self) -> None:
        """Reports by health that new sessions are not taken; calls go on to the service."""
        self.health.set("NOT_SERVING")

    async def close(self) -> None:
        """Ends all calls and the ports."""
        if self._server is not None:
            await self._server.stop(grace=None)
        if self.admin is not None:
            self.admin.close()


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the verifier's calls: gRPC takes no further handlers once it has started."""

    handler: Any = None  # of the service, once there is one

    def service(self, details: Any) -> Any:
        if self.handler is not None:
            return self.handler.service(details)
        if not details.method.startswith(f"/{SERVICE_NAME}/"):
            return None
        return grpc.stream_stream_rpc_method_handler(self._answer)  # which a unary call cannot tell apart

    async def _answer(self, requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, LOADING)


def _add_reflection(server: Any) -> None:
    from grpc_reflection.v1alpha import reflection

    names = (SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
