"""The admin port: plain HTTP for operators. `GET /metrics`, `/healthz`, `/readyz`, `/version`.

The event loop accepts, a thread answers: a scrape holds up no reply, and closing waits for nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder

from cloud_verifier.metrics import make_registry
from common.errors import UsageError

if TYPE_CHECKING:
    from cloud_verifier.engine import Engine

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"

Page = tuple[HTTPStatus, str, bytes]


class AdminServer:
    """`open()` binds and serves on the running event loop; `close()` stops at once. One thread a request.

    Raises `UsageError` when the address cannot be bound.
    """

    def __init__(self, listen: str, engine: Engine, num_streams: Callable[[], int]) -> None:
        self.port = 0
        self._listen = listen
        self._engine = engine
        self._registry = make_registry(engine, num_streams)
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://{self._listen.rpartition(':')[0]}:{self.port}"

    def open(self) -> None:
        host, _, port = self._listen.rpartition(":")
        host = host.strip("[]")
        server_type = _HTTPServerV6 if ":" in host else _HTTPServer
        try:
            self._http = server_type((host, int(port)), _handler_of(self.page))
        except OSError as error:
            raise UsageError(
                f"--admin-listen {self._listen}: cannot bind; is another verifier there? "
                "Take another port, 0 for a free one, or none"
            ) from error
        self.port = self._http.server_address[1]
        self._http.socket.setblocking(False)  # a peer that left before `accept` must not stop the loop
        self._http.timeout = 0
        asyncio.get_running_loop().add_reader(self._http.fileno(), self._http.handle_request)

    def close(self) -> None:
        if self._http is not None:
            asyncio.get_running_loop().remove_reader(self._http.fileno())
            self._http.server_close()
            self._http = None

    def page(self, path: str, accept: str) -> Page:
        """Status, content type and body of `GET path`. Called on a request's thread."""
        match path:
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return HTTPStatus.OK, content_type, encode(self._registry)
            case "/healthz":
                return _yes_or_no(self._engine.is_running, "the engine has stopped")
            case "/readyz":
                is_ready = self._engine.is_running and not self._engine.is_draining
                return _yes_or_no(is_ready, "draining" if self._engine.is_draining else "not running")
            case "/version":
                model = self._engine.model
                facts = {
                    "version": model.server_version,
                    "protocol_version": model.protocol_version,
                    "model_id": model.model_id,
                    "target_fingerprint": model.target_fingerprint,
                    "tokenizer_fingerprint": model.tokenizer_fingerprint,
                }
                return HTTPStatus.OK, "application/json", json.dumps(facts).encode() + b"\n"
        return HTTPStatus.NOT_FOUND, _TEXT, b"here are /metrics /healthz /readyz /version\n"


def _yes_or_no(is_so: bool, why_not: str) -> Page:
    if is_so:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{why_not}\n".encode()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    address_family = AF_INET

    def server_bind(self) -> None:
        """As the base class, without its reverse look-up of the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        log.warning("an admin request failed", exc_info=True)


class _HTTPServerV6(_HTTPServer):
    address_family = AF_INET6


def _handler_of(page: Callable[[str, str], Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            status, content_type, body = page(self.path.partition("?")[0], self.headers.get("Accept", ""))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "outrider"

        def log_message(self, format: str, *args: object) -> None:
            """Not a line a probe; what went wrong is in the answer."""

    return Handler
