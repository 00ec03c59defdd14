"""Opening gRPC channels, and translating gRPC's errors to ours."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import grpc

from outrider.common.errors import LinkError, LinkFaultError, OutriderError
from outrider.common.printable import one_line
from outrider.edge_client.transport.link.balancing import connect_by_call, ring_options
from outrider.edge_client.transport.link.base import CallRejectedError
from outrider.edge_client.transport.link.diagnosis import diagnose
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity
from outrider.edge_client.transport.link.targets import VerifierTarget, parse_target

MAX_MESSAGE_BYTES = 64 << 20
_DIAGNOSIS_S = 1.0
_CLOSE_AFTER_S = 0.4  # gRPC's thread that watches a channel's state polls every 200 ms
_watched_until_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
_closing: WeakSet[threading.Timer] = WeakSet()
_NO_TOKEN = grpc.StatusCode.UNAUTHENTICATED
_REJECTED = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message is too large for it",
    grpc.StatusCode.INVALID_ARGUMENT: "it cannot read our messages",
    grpc.StatusCode.UNIMPLEMENTED: "no verifier of this protocol listens there",
    _NO_TOKEN: "it wants other credentials",
    grpc.StatusCode.PERMISSION_DENIED: "it does not allow this",
}
_OPTIONS = (
    # A fresh connection must be a new socket, not a shared one that may sit in a TCP retransmission.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own back-off came back seconds after the server did (docs/design.md §10).
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Not a back-off but the time that connecting may take: several round trips of a slow link.
    # `open_channel` and the reconnector give up sooner.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str, timeout_s: float, security: LinkSecurity = PLAINTEXT, session_id: bytes = b""
) -> Any:
    """Returns a connected channel; of several verifiers to that of `session_id`, or the next that serves.

    Raises `LinkError` when refused, or not connected within `timeout_s` (each of several may take as long);
    its kind `LinkFaultError` when the two sides cannot agree on TLS; `UsageError` for files that are gone.
    """
    target = parse_target(address)
    channel = _create_channel(target, security, timeout_s)
    settled = threading.Event()
    outcomes: list[bool] = []

    def settle(is_ready: bool) -> None:
        outcomes.append(is_ready)
        settled.set()

    def on_state(state: Any) -> None:
        if state is grpc.ChannelConnectivity.READY:
            settle(True)
        elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not target.is_balanced:
            settle(False)

    channel.subscribe(on_state, try_to_connect=not target.is_balanced)
    wait_s = timeout_s * target.num_tries
    if target.is_balanced:
        connect_by_call(channel, session_id, wait_s, settle)
    settled.wait(wait_s)
    channel.unsubscribe(on_state)
    _watched_until_s[channel] = time.monotonic() + _CLOSE_AFTER_S
    if outcomes[:1] == [True]:
        return channel
    close_later(channel)
    found = diagnose(address, security, min(timeout_s, _DIAGNOSIS_S)) if outcomes else None
    hangs_up = "none of them serves" if target.is_balanced else "it hangs up"
    why = found.found if found else hangs_up if outcomes else f"no answer in {wait_s:.1f} s"
    error_type = LinkFaultError if found and found.is_fault else LinkError
    raise error_type(f"cannot connect to a verifier at {address}: {why}", found.fix if found else "")


def _create_channel(target: VerifierTarget, security: LinkSecurity, timeout_s: float) -> Any:
    options = tuple({**dict(_OPTIONS), **ring_options(timeout_s)}.items()) if target.is_balanced else _OPTIONS
    if not security.is_tls:
        return grpc.insecure_channel(target.grpc_name(), options=options)
    credentials = grpc.ssl_channel_credentials(security.roots(), *security.client_pair())
    name = target.tls_name(security.server_name)
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(target.grpc_name(), credentials, options=options + named)


def close_later(channel: Any) -> None:
    """Closes the channel once gRPC's thread that watches its state, until 200 ms after the connection was made,
    has ended: it would die with a traceback."""
    wait_s = _watched_until_s.get(channel, 0.0) - time.monotonic()
    timer = threading.Timer(max(0.0, wait_s), channel.close)
    timer.daemon = True
    _closing.add(timer)
    timer.start()


@atexit.register
def _close_all() -> None:
    """Waits until the last channels are closed: gRPC's threads must not meet the end of the interpreter."""
    end_s = time.monotonic() + 2 * _CLOSE_AFTER_S
    for timer in list(_closing):
        timer.join(max(0.0, end_s - time.monotonic()))


def translate(error: grpc.RpcError, address: str) -> OutriderError:
    """Returns our exception for a failed call."""
    code, details = error.code(), one_line(error.details() or "")
    if code in _REJECTED:
        fix = "name a token that it knows with --token-file" if code is _NO_TOKEN else ""
        found = f"the verifier at {address} rejects the call: {_REJECTED[code]} ({details})"
        return CallRejectedError(found, fix)
    return LinkError(f"lost the connection to {address}: {code.name.lower()}: {details}")
