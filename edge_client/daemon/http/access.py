"""Decides who may call: holders of an API key, and browsers only from pages that the operator named.

A web page anywhere may send requests to 127.0.0.1 from its reader's browser. The `Origin` header shows that;
the `Host` header shows a page whose own name was made to resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.common.config.addresses import is_loopback, split_address
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.daemon.openai.errors import ApiError

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon

log = logging.getLogger(__name__)

PUBLIC = frozenset({"/health", "/ready"})  # health answers without credentials, and says little


class AccessMiddleware:
    """Answers 401 and 403 before anything else looks at a request. Reads the daemon's present configuration,
    so a reload takes effect at once."""

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon
        self._cors_of: tuple[str, ...] = ()
        self._outer: ASGIApp = self._guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origins = self._daemon.serve.cors_origin
        if origins != self._cors_of:
            self._cors_of, self._outer = origins, self._with_cors(origins)
        await self._outer(scope, receive, send)

    def _with_cors(self, origins: tuple[str, ...]) -> ASGIApp:
        if not origins:
            return self._guarded
        return CORSMiddleware(
            self._guarded,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # an https page that calls this machine asks for it
            expose_headers=["x-outrider-warning", "retry-after", "x-request-id"],
        )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await refusal(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        serve, keys = self._daemon.serve, self._daemon.keys
        check_body(headers)
        if path in PUBLIC:
            return
        check_origin(headers, serve.cors_origin)
        if not keys:
            check_host(headers, serve)
        elif not keys.match(shown_key(headers)):
            # A browser asks its user for a password then: the key, under any name.
            scheme = 'Basic realm="outrider, password: an API key"' if path == "/" else "Bearer"
            message = "a valid API key is needed: Authorization: Bearer KEY"
            found = {"WWW-Authenticate": scheme}
            raise ApiError(401, message, "authentication_error", code="invalid_api_key", headers=found)


def refusal(path: str, error: ApiError) -> JSONResponse:
    """Returns the answer to a request that no endpoint takes, and logs why."""
    log.info("refused", extra={"route": path[:100], **error.facts()})
    return JSONResponse(error.body(), error.status, error.headers)


def check_body(headers: Headers) -> None:
    """Raises `ApiError` 400 where two headers disagree about the body's end: a proxy before this daemon might
    believe the other one, and take a part of one client's request for another's."""
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "Content-Length and Transfer-Encoding do not go together"
        raise ApiError(400, message, code="ambiguous_body", headers={"Connection": "close"})


def shown_key(headers: Headers) -> str:
    """Returns the key of `Bearer KEY`, or of `Basic` with the key as password; empty where there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("utf-8", "replace").partition(":")[2]
        except ValueError:  # no base64, or not even ASCII
            return ""
    return ""


def check_origin(headers: Headers, allowed: tuple[str, ...]) -> None:
    """Raises `ApiError` 403 for a browser's call from a page that is neither ours nor named."""
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    place = _place(origin)
    if not place or place != headers.get("host", ""):
        message = f"pages of {origin} may not call this daemon; --cors-origin {origin} allows it"
        raise ApiError(403, message, "permission_error", code="origin_not_allowed")


def check_host(headers: Headers, serve: DaemonConfig) -> None:
    """Raises `ApiError` 403 where a loopback daemon is called by a foreign name."""
    host, _ = split_address(serve.listen, "--listen")
    if not is_loopback(host):
        return
    called = _name(headers.get("host", ""))
    if called and not is_loopback(called) and called not in serve.allowed_host:
        message = f"this daemon is not called {called}; --allowed-host {called} allows it"
        raise ApiError(403, message, "permission_error", code="host_not_allowed")


def _place(origin: str) -> str:
    """Returns HOST:PORT of an `Origin`; empty for `null` and for what cannot be parsed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name(host: str) -> str:
    """Returns a `Host` without its port; unchanged where it cannot be parsed, which then matches no name."""
    try:
        return urlsplit(f"//{host}").hostname or host
    except ValueError:
        return host
