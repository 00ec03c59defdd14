"""Spans of the verifier: one an opening, a round, a generation. They exist only with a span provider.

Their parent is the context that came with the call (W3C `traceparent` in its metadata); a stream has one
for all its rounds. Attributes are ids, counts and times; never text, never tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from outrider.cloud_verifier.engine.job import Disconnect, Reply
from outrider.common.process.logs import session_tag
from outrider.common.process.tracing import find_tracer
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    RoundError,
    RoundMetrics,
    SessionRequest,
    SessionResponse,
    Verdict,
    VerifyRequest,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_MS_PER_NS = 1e-6


class RoundTracer:
    """Makes the spans of requests."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def follow(
        self, tenant: str, session_id: bytes, request: SessionRequest | Disconnect, reply: Reply
    ) -> Reply:
        """Returns `reply` with a span from now until its last answer. Called in the context of the call."""
        match request:
            case OpenRequest():
                name, facts = "outrider.open", {"outrider.num_prompt_tokens": request.num_prompt_tokens}
            case VerifyRequest():
                name, facts = "outrider.verify", {"outrider.num_draft_tokens": len(request.draft_tokens)}
            case GenerateRequest():
                name, facts = "outrider.generate", {"outrider.max_new_tokens": request.max_new_tokens}
            case _:
                return reply
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(name, kind=SpanKind.SERVER, attributes=facts)
        span.set_attribute("outrider.session", session_tag(session_id))
        span.set_attribute("outrider.round_id", request.round_id)
        span.set_attribute("outrider.tenant", tenant)
        return _Follower(span, reply).take


class _Follower:
    """Passes answers on and adds up their times, on the engine's thread."""

    def __init__(self, span: Span, reply: Reply) -> None:
        self._span = span
        self._reply = reply
        self._num_tokens = 0
        self._queue_ns = 0
        self._forward_ns = 0

    def take(self, response: SessionResponse) -> None:
        self._reply(response)
        match response:
            case Verdict(metrics=metrics):
                self._span.set_attribute("outrider.num_accepted_tokens", response.accepted_len)
                self._end(metrics)
            case Opened(metrics=metrics):
                self._span.set_attribute("outrider.is_existing", response.is_existing)
                self._end(metrics)
            case GeneratedTokens(metrics=metrics):
                self._num_tokens += len(response.token_ids)
                self._add(metrics)
                if response.is_last:
                    self._span.set_attribute("outrider.num_new_tokens", self._num_tokens)
                    self._end(RoundMetrics(batch_size=metrics.batch_size))
            case RoundError():
                from opentelemetry.trace import StatusCode

                self._span.set_attribute("outrider.error_code", str(response.code))
                self._span.set_status(StatusCode.ERROR, str(response.code))
                self._end(RoundMetrics())

    def _add(self, metrics: RoundMetrics) -> None:
        self._queue_ns += metrics.queue_ns
        self._forward_ns += metrics.forward_ns

    def _end(self, metrics: RoundMetrics) -> None:
        self._add(metrics)
        self._span.set_attribute("outrider.queue_ms", self._queue_ns * _MS_PER_NS)
        self._span.set_attribute("outrider.forward_ms", self._forward_ns * _MS_PER_NS)
        self._span.set_attribute("outrider.batch_size", metrics.batch_size)
        self._span.end()


class TraceContextInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Takes the caller's context from the metadata; the call's task, and what it starts, run in it."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Attaches the context to the call's task."""
        from opentelemetry import context, propagate

        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        context.attach(propagate.extract(metadata))  # the task is this call's own: nothing to detach
        return await continuation(details)


def create_round_tracer() -> RoundTracer | None:
    """Returns the tracer, None where this process has no span provider."""
    tracer = find_tracer()
    return RoundTracer(tracer) if tracer is not None else None
