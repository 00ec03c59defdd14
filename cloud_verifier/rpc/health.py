"""gRPC health: for everybody, without credentials. A verifier without grpcio-health-checking serves all the same, and
warns.

grpcio's own servicer counts no calls, forgets those that watch when one of them ends, and waits for a client that does
not read before it tells the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import grpc

from outrider.cloud_verifier.rpc.one_message import SILENT_S, read_message
from outrider.common import codec
from outrider.common.process.extras import how_to_install

log = logging.getLogger(__name__)

HEALTH_SERVICE_NAME = "grpc.health.v1.Health"
# An honest connection has one watch, and a check now and then. Nobody is asked for credentials here.
MAX_CONNECTION_CALLS = 16
# On all connections; edges of a list of verifiers have one each. They lengthen garbage collections as calls do.
MAX_WATCHES = 1024
Status = Literal["SERVING", "NOT_SERVING"]


class HealthError(Exception):
    """A health call ends with status `code`."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class HealthCalls:
    """Answers the calls of gRPC health. Lives on one event loop."""

    def __init__(self, status_of: Callable[[str], Status | None], *, has_watch: bool) -> None:
        """`status_of` returns the status of a service, None for one that there is not. Where there is a watch, a change
        of what it returns is told by `changed`."""
        self.num_calls: Counter[str] = Counter()  # of each connection, by its peer
        self.num_watches = 0
        self._status_of = status_of
        self._has_watch = has_watch
        self._change = asyncio.Event()  # set once, at the next change

    def add_to(self, server: Any) -> None:
        """Registers the service with a grpc.aio server. Raises `ModuleNotFoundError` without grpcio-health-checking."""
        import grpc_health.v1.health_pb2  # noqa: F401

        handlers = {"Check": grpc.stream_unary_rpc_method_handler(self._check)}
        if self._has_watch:
            handlers["Watch"] = grpc.stream_stream_rpc_method_handler(self._watch)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(HEALTH_SERVICE_NAME, handlers),)
        )

    def changed(self) -> None:
        """Tells those that watch of a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def _check(self, _requests: Any, context: Any) -> bytes:
        with self._counted(context) as is_over:
            if is_over:
                message = f"{MAX_CONNECTION_CALLS} health calls of this connection are open"
                raise HealthError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
            service = await _read_service(context)
            if (status := self._status_of(service)) is None:
                raise HealthError(grpc.StatusCode.NOT_FOUND, "there is no such service here")
            return _encode(status)

    async def _watch(self, _requests: Any, context: Any) -> None:
        """Sends the status, and each one that differs from the last sent. To gRPC's clients UNIMPLEMENTED says that the
        connection can be used unwatched: who opens many does not keep others' from being used."""
        with self._counted(context) as is_over:
            if is_over or self.num_watches >= MAX_WATCHES:
                most = f"at most {MAX_CONNECTION_CALLS} calls of a connection, {MAX_WATCHES} watches of all"
                raise HealthError(grpc.StatusCode.UNIMPLEMENTED, f"too many health watches are open: {most}")
            self.num_watches += 1
            try:
                await self._tell(await _read_service(context), context)
            finally:
                self.num_watches -= 1

    async def _tell(self, service: str, context: Any) -> None:
        told = ""
        while True:
            change, status = self._change, self._status_of(service) or "SERVICE_UNKNOWN"
            if status != told:
                told = status
                await context.write(_encode(status))
            await change.wait()

    @contextlib.contextmanager
    def _counted(self, context: Any) -> Iterator[bool]:
        """Counts a call while it is open; yields whether it is one too many of its connection."""
        peer = context.peer()
        is_over = self.num_calls[peer] >= MAX_CONNECTION_CALLS
        self.num_calls[peer] += 1
        try:
            yield is_over
        finally:
            self.num_calls[peer] -= 1
            if not self.num_calls[peer]:
                del self.num_calls[peer]


class Health:
    """Holds the health of the whole server ("") and of one service: not serving at first."""

    def __init__(self, service: str) -> None:
        self._statuses: dict[str, Status] = {"": "NOT_SERVING", service: "NOT_SERVING"}
        self.calls = HealthCalls(self._statuses.get, has_watch=True)

    def add_to(self, server: Any) -> None:
        """Registers the service with a grpc.aio server."""
        try:
            self.calls.add_to(server)
        except ModuleNotFoundError:
            log.warning("no health checks: grpcio-health-checking is missing; %s", how_to_install("cloud"))

    def set(self, status: Status) -> None:
        """Answers with `status` from now on."""
        self._statuses.update(dict.fromkeys(self._statuses, status))
        self.calls.changed()


async def _read_service(context: Any) -> str:
    from grpc_health.v1 import health_pb2

    return str(codec.parse(health_pb2.HealthCheckRequest, await read_message(context, SILENT_S)).service)


def _encode(status: str) -> bytes:
    from grpc_health.v1 import health_pb2

    number = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    return bytes(health_pb2.HealthCheckResponse(status=number).SerializeToString())
