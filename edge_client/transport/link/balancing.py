"""Balancing: gRPC's ring hash over the session's id chooses one of several verifiers.

All connections of a session reach the same verifier, which has its tokens and KV; where that one is gone or
drains, the next on the ring. Nothing but speed depends on it: any verifier rebuilds a session from its ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

SESSION_HEADER = "x-session-id"
_CHECK = "/grpc.health.v1.Health/Check"
# gRPC reads it once, before the first channel; without it `requestHashHeader` is refused (docs/design.md §10).
_IS_ALLOWED = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"

_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"ring_hash_experimental": {"requestHashHeader": SESSION_HEADER}}],
    # A draining verifier takes no new connection. The check costs a connection one round trip.
    "healthCheckConfig": {"serviceName": ""},
}


def allow_ring_hash() -> None:
    """Enables `requestHashHeader` in gRPC. Must run before gRPC is imported."""
    os.environ.setdefault(_IS_ALLOWED, "true")


def ring_options(connect_s: float) -> dict[str, Any]:
    """Returns channel options that try the next verifier where one is not connected after `connect_s`."""
    return {
        "grpc.service_config": json.dumps(_SERVICE_CONFIG),
        "grpc.min_reconnect_backoff_ms": int(connect_s * 1e3),
    }


def connect_by_call(
    channel: Any, session_id: bytes, timeout_s: float, on_end: Callable[[bool], None]
) -> None:
    """Makes the channel connect to the verifier of the session: the ring does so for a call, a health check here.

    `on_end` is called, on a thread of gRPC's, with whether the call succeeded.
    """
    metadata = ((SESSION_HEADER, session_id.hex()),) if session_id else ()
    call = channel.unary_unary(_CHECK).future(b"", timeout=timeout_s, metadata=metadata)
    call.add_done_callback(lambda done: on_end(not done.cancelled() and done.exception() is None))
