"""Makes the daemon's routes, and the answers to requests that match none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.edge_client.daemon.http.access import AccessMiddleware, refusal
from outrider.edge_client.daemon.http.endpoint import GenerationEndpoint
from outrider.edge_client.daemon.http.front import Front
from outrider.edge_client.daemon.http.page import PAGE_HEADERS, page_html
from outrider.edge_client.daemon.openai.errors import ApiError
from outrider.edge_client.daemon.openai.parsed import Kind
from outrider.edge_client.drafting.base import runtime_of

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon

_MAIN_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(daemon: Daemon) -> ASGIApp:
    """Returns the daemon as an ASGI application."""
    routes = make_routes(daemon, _Handlers(daemon))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(AccessMiddleware, daemon=daemon)],
        exception_handlers={HTTPException: _on_http_error, ApiError: _on_api_error},
    )
    app.router.redirect_slashes = False  # to a client that follows none, a redirected POST is an empty answer
    return Front(app, routes, daemon)


def make_routes(daemon: Daemon, handlers: _Handlers) -> list[Route]:
    """Returns all routes of the daemon."""
    return [
        Route("/", handlers.page),
        Route("/health", handlers.health),
        Route("/ready", handlers.ready),
        Route("/metrics", handlers.metrics),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name:path}", handlers.model),
        Route("/v1/sessions", handlers.sessions),
        Route("/v1/completions", GenerationEndpoint(daemon, Kind.COMPLETION), methods=["POST"]),
        Route("/v1/chat/completions", GenerationEndpoint(daemon, Kind.CHAT), methods=["POST"]),
    ]


class _Handlers:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._created = int(time.time())

    async def page(self, request: Request) -> Response:
        return Response(page_html(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answers 200 where a request would be served now: the draft is loaded and the verifier answers; else
        503."""
        daemon = self._daemon
        trouble = "stopping" if daemon.admission.is_stopping else ""
        if not trouble:
            state = await daemon.check_verifier()
            trouble = "" if state is None or state.is_reachable else "verifier unreachable"
        body: dict[str, object] = {"ready": not trouble, "draft": daemon.edge.draft is not None}
        if trouble:
            body["trouble"] = trouble
        return JSONResponse(body, 503 if trouble else 200, {"Retry-After": "2"} if trouble else None)

    async def metrics(self, request: Request) -> Response:
        await self._daemon.check_verifier()  # which one of them tells of
        return Response(self._daemon.metrics.text(), media_type=_METRICS_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await self._model()]})

    async def model(self, request: Request) -> Response:
        await self._daemon.check_model(request.path_params["name"])
        return JSONResponse(await self._model())

    async def sessions(self, request: Request) -> Response:
        daemon = self._daemon
        counts = {
            "running": daemon.admission.num_running,
            "waiting": daemon.admission.num_waiting,
            "max_running": daemon.admission.max_running,
            "max_waiting": daemon.admission.max_waiting,
        }
        return JSONResponse({"object": "list", "data": daemon.activity.describe(), **counts})

    async def _model(self) -> dict[str, object]:
        daemon = self._daemon
        state = await daemon.watch.check(daemon.config)
        draft, model = daemon.edge.draft, state.model
        about: dict[str, object] = {
            "mode": daemon.config.mode,
            "on_timeout": daemon.config.outage.on_timeout,
            "modes": [str(mode) for mode in REQUESTABLE_MODES if draft is not None or not mode.has_draft],
            "method": daemon.config.verification.method,
            "draft_fingerprint": draft.fingerprint if draft else None,
            "draft_runtime": runtime_of(draft),
            "draft_context": draft.max_context if draft else None,
            "has_chat_template": daemon.template is not None,
            "tool_calls": daemon.tool_family.name if daemon.tool_family else None,
            "verifier": daemon.config.verifier,
            "verifier_reachable": state.is_reachable,
            "verifier_answer_ms": None if state.answer_ms is None else round(state.answer_ms, 2),
        }
        if model is not None:
            about |= {
                "target": model.model_id,
                "target_fingerprint": model.target_fingerprint,
                "dtype": model.dtype,
                "kv_dtype": model.kv_dtype,
                "quantisation": model.quantisation,
                "device": model.device,
                "max_context": model.limits.max_context,
                "methods": [str(method) for method in model.methods],
            }
        return {
            "id": daemon.serve.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            # vLLM's names, which clients read; null until a verifier has answered.
            "root": None if model is None else model.model_id,
            "max_model_len": None if model is None else model.limits.max_context,
            "outrider": about,
        }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(request.url.path, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += f"; there are {', '.join(_MAIN_ROUTES)}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return refusal(request.url.path, ApiError(error.status_code, message, code=code, headers=headers))
