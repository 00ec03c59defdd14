"""Which of several verifiers a session is sent to: gRPC's ring hash over the session's id.

All connections of a session meet the same verifier, which has its text and KV; where that one is gone or
drains, the next on the ring. Nothing but speed depends on it: any verifier rebuilds a session from its ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

SESSION_HEADER = "x-session-id"
_CHECK = "/grpc.health.v1.Health/Check"
# gRPC reads it once, before the first channel; without it `requestHashHeader` is refused (DESIGN §10).
_IS_ALLOWED = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"

_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"ring_hash_experimental": {"requestHashHeader": SESSION_HEADER}}],
    # One that drains takes no new connection. Costs a connection one round trip: the first answer.
    "healthCheckConfig": {"serviceName": ""},
}


def allow_ring_hash() -> None:
    os.environ.setdefault(_IS_ALLOWED, "true")


def ring_options(connect_s: float) -> dict[str, Any]:
    """Channel options. A verifier that is not connected after `connect_s` makes way for the next."""
    return {
        "grpc.service_config": json.dumps(_SERVICE_CONFIG),
        "grpc.min_reconnect_backoff_ms": int(connect_s * 1e3),
    }


def knock(channel: Any, session_id: bytes, timeout_s: float, on_end: Callable[[bool], None]) -> None:
    """Makes the channel connect: the ring does so for a call, to the verifier that the call's session has.

    `on_end` hears, on a thread of gRPC's, whether the call came through.
    """
    metadata = ((SESSION_HEADER, session_id.hex()),) if session_id else ()
    call = channel.unary_unary(_CHECK).future(b"", timeout=timeout_s, metadata=metadata)
    call.add_done_callback(lambda done: on_end(not done.cancelled() and done.exception() is None))
