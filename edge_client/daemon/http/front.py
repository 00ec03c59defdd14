"""The outermost layer of the daemon: it counts every answer, whoever gives it, and refuses what comes by too many
connections."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.common.process.logs import LogLimiter
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.daemon.openai.errors import ApiError

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon

log = logging.getLogger(__name__)

GONE = 499  # in logs and metrics: the client left before its answer (nginx's number)
OTHER = "other"  # the label of requests that match no route: one for all, as clients choose their paths
STATUS = "outrider.status"  # in a scope: how a request ended, where its first bytes did not say
MAX_CONNECTIONS = 512  # or twice what may run and wait; more get 503. A process may have 1,024 files open


class Front:
    """Counts answers by route and status in `daemon.metrics`."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], daemon: Daemon) -> None:
        self._app, self._routes, self._daemon = app, routes, daemon
        self._limiter = LogLimiter(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, noting)
        finally:
            self._daemon.metrics.answered(self._route_of(scope), scope.get(STATUS, status))

    def _route_of(self, scope: Scope) -> str:
        """Returns the route that a request's path matches, whatever its method."""
        matching = (each.path_format for each in self._routes if each.matches(scope)[0] is not Match.NONE)
        return next(matching, OTHER)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """Returns the answer to a request where too many connections are open; None where there are not."""
        most = max_connections(self._daemon.serve)
        number = len(scope.get("state", {}).get("connections", ()))
        if number <= most:
            return None
        error = ApiError(
            503,
            f"{number} connections are open; at most {most}",
            "server_error",
            code="too_many_connections",
            headers={"Retry-After": "2", "Connection": "close"},
        )
        self._limiter.info("crowded", "refused: too many connections", error.facts())
        return JSONResponse(error.body(), error.status, error.headers)


def max_connections(serve: DaemonConfig) -> int:
    """Returns how many connections may be open."""
    return max(MAX_CONNECTIONS, 2 * (serve.max_requests + serve.max_queue))
