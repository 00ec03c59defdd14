"""gRPC channels as this edge wants them, and gRPC's errors as ours."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from common.errors import LinkError, OutriderError
from edge_client.link.base import CallRejectedError

MAX_MESSAGE_BYTES = 64 << 20
_REJECTED = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message is too large for it",
    grpc.StatusCode.INVALID_ARGUMENT: "it cannot read our messages",
    grpc.StatusCode.UNIMPLEMENTED: "no verifier of this protocol listens there",
    grpc.StatusCode.UNAUTHENTICATED: "it wants credentials",
    grpc.StatusCode.PERMISSION_DENIED: "it does not allow this",
}
_OPTIONS = (
    # A fresh connection must be a new socket, not a shared one that may sit in a TCP retransmission.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own back-off came back seconds after the server did (DESIGN §10).
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, timeout_s: float) -> Any:
    """A connected channel. Raises `LinkError` when refused, or not there within `timeout_s`."""
    channel = grpc.insecure_channel(address, options=_OPTIONS)
    settled = threading.Event()
    states: list[Any] = []

    def on_state(state: Any) -> None:
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            states.append(state)
            settled.set()

    channel.subscribe(on_state, try_to_connect=True)
    settled.wait(timeout_s)
    channel.unsubscribe(on_state)
    if grpc.ChannelConnectivity.READY in states[:1]:
        return channel
    channel.close()
    why = "connection refused, or no such host" if states else f"no answer in {timeout_s:.1f} s"
    raise LinkError(f"cannot connect to a verifier at {address}: {why}")


def translate(error: grpc.RpcError, address: str) -> OutriderError:
    """Our exception for a failed call."""
    code, details = error.code(), error.details()
    if code in _REJECTED:
        return CallRejectedError(f"the verifier at {address} rejects the call: {_REJECTED[code]} ({details})")
    return LinkError(f"lost the connection to {address}: {code.name.lower()}: {details}")
