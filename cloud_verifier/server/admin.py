"""The admin port: HTTP for operators. `GET /metrics`, `/healthz`, `/readyz`, `/version`.

It opens before the target is loaded; until then all but `/healthz` is answered 503. The event loop accepts and a
thread answers, so a scrape delays no reply, and closing does not wait for clients. On loopback it is plain and open.
Beyond, it has the verifier's certificate, and requires an admin token for all but the probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import choose_encoder

from outrider.cloud_verifier.security.authenticator import AccessError
from outrider.cloud_verifier.server.metrics import make_registry
from outrider.common.config.addresses import is_loopback, split_address
from outrider.common.errors import UsageError
from outrider.common.types import LOADING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from outrider.cloud_verifier.engine.engine import Engine
    from outrider.cloud_verifier.rpc.ended_calls import EndedCalls
    from outrider.cloud_verifier.security.server_security import ServerSecurity

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
MAX_REQUESTS = 32  # at once; further connections are closed
_TEXT = "text/plain; charset=utf-8"

_PROBES = ("/healthz", "/readyz")
_PATHS = ("/metrics", *_PROBES, "/version")

Page = tuple[HTTPStatus, str, bytes]


class AdminServer:
    """Serves the admin port between `open()`, on the running event loop, and `close()`, of an engine from `admit()`
    on. One thread a request.

    `open` raises `UsageError` when the address cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        security: ServerSecurity | None = None,
        ended_calls: EndedCalls | None = None,
    ) -> None:
        self.port = 0
        self._listen = listen
        self._host, self._listen_port = split_address(listen, "--admin-listen")
        self._make_registry = partial(make_registry, security=security, ended_calls=ended_calls)
        self._security = None if is_loopback(self._host) else security
        self._served: tuple[Engine, CollectorRegistry] | None = None
        self._http: _HTTPServer | None = None

    @property
    def is_tls(self) -> bool:
        """Returns whether requests are encrypted."""
        return self._security is not None and self._security.certificates is not None

    @property
    def url(self) -> str:
        """Returns the port's URL, known after `open`."""
        return f"http{'s' * self.is_tls}://{self._listen.rpartition(':')[0]}:{self.port}"

    def open(self) -> None:
        """Binds the port and serves on the running event loop. Raises `UsageError`."""
        server_type = _HTTPServerV6 if ":" in self._host else _HTTPServer
        try:
            self._http = server_type((self._host, self._listen_port), _handler_of(self.page, self._admit))
        except OSError as error:
            raise UsageError(
                f"--admin-listen {self._listen}: cannot bind; is another verifier there? "
                "Take another port, 0 for a free one, or none"
            ) from error
        self._http.tls_context = self._tls_context
        self.port = self._http.server_address[1]
        self._http.socket.setblocking(False)  # a peer that left before `accept` must not stop the loop
        self._http.timeout = 0
        asyncio.get_running_loop().add_reader(self._http.fileno(), self._http.handle_request)

    def admit(self, engine: Engine, num_streams: Callable[[], int]) -> None:
        """Answers of `engine` and of so many open streams from now on."""
        self._served = engine, self._make_registry(engine, num_streams)

    def _tls_context(self) -> SSLContext | None:
        certificates = self._security.certificates if self._security is not None else None
        return certificates.http_context if certificates is not None else None

    def _admit(self, path: str, authorizations: list[str]) -> None:
        if self._security is None or self._security.authenticator is None or path in _PROBES:
            return
        try:
            if not self._security.authenticator.identify(authorizations).is_admin:
                raise AccessError("denied", "want a token of `cloud-verifier token new --admin`")
        except AccessError as error:
            self._security.on_refused(error)
            raise

    def close(self) -> None:
        """Stops serving; running requests are not waited for."""
        if self._http is not None:
            asyncio.get_running_loop().remove_reader(self._http.fileno())
            self._http.server_close()
            self._http = None

    def page(self, path: str, accept: str) -> Page:
        """Returns status, content type and body of `GET path`. Called on a request's thread."""
        if path not in _PATHS:
            return HTTPStatus.NOT_FOUND, _TEXT, f"here are {' '.join(_PATHS)}\n".encode()
        if self._served is None:
            return _yes_or_no(path == "/healthz", LOADING)  # a restart would only begin the loading again
        engine, registry = self._served
        match path:
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return HTTPStatus.OK, content_type, encode(registry)
            case "/healthz":
                return _yes_or_no(engine.is_running, "the engine has stopped")
            case "/readyz":
                is_ready = engine.is_running and not engine.is_draining
                return _yes_or_no(is_ready, "draining" if engine.is_draining else "not running")
            case _:
                model = engine.model
                facts = {
                    "version": model.server_version,
                    "protocol_version": model.protocol_version,
                    "model_id": model.model_id,
                    "target_fingerprint": model.target_fingerprint,
                    "tokenizer_fingerprint": model.tokenizer_fingerprint,
                }
                return HTTPStatus.OK, "application/json", json.dumps(facts).encode() + b"\n"


def _yes_or_no(is_so: bool, why_not: str) -> Page:
    if is_so:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{why_not}\n".encode()


@contextlib.contextmanager
def _ended_in_time(connection: socket) -> Iterator[None]:
    """Ends a connection after REQUEST_TIMEOUT_S: a socket's own timeout begins anew with every byte."""

    def end() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(SHUT_RDWR)

    timer = threading.Timer(REQUEST_TIMEOUT_S, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    address_family = AF_INET
    tls_context: Callable[[], SSLContext | None]

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handles a request on its own thread, so that a client slow to shake hands delays nobody."""
        context = self.tls_context()
        if context is None:
            with _ended_in_time(request):
                super().finish_request(request, client_address)
            return
        request.settimeout(REQUEST_TIMEOUT_S)
        with (
            context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as wrapped,
            _ended_in_time(wrapped),
        ):
            wrapped.do_handshake()
            super().finish_request(wrapped, client_address)

    def server_bind(self) -> None:
        """Binds as the base class does, without its reverse look-up of the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("an admin request failed", exc_info=True)  # anybody who connects and leaves causes one


class _HTTPServerV6(_HTTPServer):
    address_family = AF_INET6


def _handler_of(
    page: Callable[[str, str], Page], admit: Callable[[str, list[str]], None]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            try:
                admit(path, self.headers.get_all("Authorization", []))
                status, content_type, body = page(path, self.headers.get("Accept", ""))
            except AccessError as error:
                status = HTTPStatus.FORBIDDEN if error.reason == "denied" else HTTPStatus.UNAUTHORIZED
                content_type, body = _TEXT, f"{error}\n".encode()
            self.send_response(status)
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "outrider"

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: a line a probe is too many, and errors are in the answers."""

    return Handler
