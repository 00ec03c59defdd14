"""Opening gRPC channels, and translating gRPC's errors to ours."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any
from weakref import WeakSet

import grpc

from outrider.common.errors import LinkError, LinkFaultError, OutriderError
from outrider.common.printable import one_line
from outrider.common.types import LOADING
from outrider.edge_client.transport.link.balancing import connect_by_call, ring_options
from outrider.edge_client.transport.link.base import CallRejectedError
from outrider.edge_client.transport.link.diagnosis import diagnose
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity
from outrider.edge_client.transport.link.targets import VerifierTarget, parse_target

MAX_MESSAGE_BYTES = 64 << 20
_DIAGNOSIS_S = 1.0
_WATCH_END_S = 5.0  # the longest wait for gRPC's thread, which takes 200 ms on an idle machine
_closing: WeakSet[threading.Thread] = WeakSet()
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
    """Closes the channel, on a thread, once gRPC's own thread that watches its state has ended: that one would die
    with a traceback. It looks every 200 ms whether anybody wants to know the state still."""
    thread = threading.Thread(target=_close_unwatched, args=(channel,), daemon=True)
    _closing.add(thread)
    thread.start()


def _close_unwatched(channel: Any) -> None:
    end_s = time.monotonic() + _WATCH_END_S
    while is_watched(channel) and time.monotonic() < end_s:
        time.sleep(0.02)
    channel.close()


def is_watched(channel: Any) -> bool:
    """Returns whether gRPC's thread that watches this channel's state runs. gRPC has no public way to ask."""
    return bool(getattr(getattr(channel, "_connectivity_state", None), "polling", False))


@atexit.register
def _close_all() -> None:
    """Waits until the last channels are closed: gRPC's threads must not meet the end of the interpreter."""
    end_s = time.monotonic() + _WATCH_END_S
    for thread in list(_closing):
        thread.join(max(0.0, end_s - time.monotonic()))


def translate(error: grpc.RpcError, address: str) -> OutriderError:
    """Returns our exception for a failed call."""
    code, details = error.code(), one_line(error.details() or "")
    if code in _REJECTED:
        fix = "name a token that it knows with --token-file" if code is _NO_TOKEN else ""
        found = f"the verifier at {address} rejects the call: {_REJECTED[code]} ({details})"
        return CallRejectedError(found, fix)
    if code is grpc.StatusCode.UNAVAILABLE and details == LOADING:
        return LinkError(f"the verifier at {address} is {LOADING}", "wait until it has loaded")
    return LinkError(f"lost the connection to {address}: {code.name.lower()}: {details}")
