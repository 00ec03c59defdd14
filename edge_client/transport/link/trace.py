"""The edge's spans: one a connection, all of a session in one trace, sent to the verifier as metadata.

A stream's metadata is sent once, so the rounds on it cannot each have a context of their own: the verifier's
spans of rounds are children of the connection's span, distinguished by session and round id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.common.process.logs import session_tag
from outrider.common.process.tracing import find_tracer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

Metadata = tuple[tuple[str, str], ...]


class ConnectionSpan:
    """The span of a connection; `metadata` carries its context. Without a tracer both are empty."""

    def __init__(self, span: Span | None = None, metadata: Metadata = ()) -> None:
        self.metadata = metadata
        self._span = span

    def end(self) -> None:
        """Ends the span."""
        if self._span is not None:
            self._span.end()


class SessionTrace:
    """Starts connection spans. The first is a child of the caller's span, if any; later ones of the first."""

    def __init__(self, address: str, session_id: bytes) -> None:
        self._tracer = find_tracer()
        self._parent: Context | None = None
        if self._tracer is not None:
            from opentelemetry import context

            self._parent = context.get_current()  # connections are made on another thread
            tag = session_tag(session_id)
            self._facts = {"rpc.system": "grpc", "server.address": address, "outrider.session": tag}
            self._is_first = True

    def begin(self) -> ConnectionSpan:
        """Starts a span; an empty one without a tracer."""
        if self._tracer is None:
            return ConnectionSpan()
        from opentelemetry import propagate, trace

        span = self._tracer.start_span(
            "outrider.connection", self._parent, trace.SpanKind.CLIENT, self._facts
        )
        context = trace.set_span_in_context(span, self._parent)
        if self._is_first:
            self._parent, self._is_first = context, False
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context)
        return ConnectionSpan(span, tuple((key.lower(), value) for key, value in carrier.items()))
