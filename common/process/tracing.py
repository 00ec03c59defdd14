"""OpenTelemetry where it is set up; nothing, not even an import, where it is not.

A span provider is either ours (`exporting_spans`, from --otlp-endpoint) or that of the surrounding program,
which has then imported the API: where it is not in `sys.modules`, there is nothing to do. Spans contain ids,
counts and times, never text or tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.version import own_version

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

EXPORT_TIMEOUT_S = 3


@contextlib.contextmanager
def exporting_spans(endpoint: str, service_name: str) -> Iterator[None]:
    """Sends this process's spans to an OTLP/gRPC collector at `endpoint` (a URL; empty: nowhere).

    The last ones are sent on leaving. Raises `UsageError` for another form of address, and where the `otel`
    extra is not installed.
    """
    if not endpoint:
        yield
        return
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--otlp-endpoint {endpoint}: want a URL, for example http://127.0.0.1:4317")
    with needs_extra("otel", "--otlp-endpoint"):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({"service.name": service_name, "service.version": own_version()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=EXPORT_TIMEOUT_S * 1000))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def find_tracer() -> Tracer | None:
    """Returns a tracer of this process's provider, or None where it has none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer: Tracer = trace.get_tracer("outrider", own_version())
    return tracer
