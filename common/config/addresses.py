"""Parses addresses HOST:PORT, and checks that they can be listened on."""

from __future__ import annotations

import errno
import ipaddress
import socket

from outrider.common.errors import UsageError


def split_address(address: str, flag: str, example: str = "127.0.0.1:7077") -> tuple[str, int]:
    """Returns host (without the brackets of IPv6) and port. Raises `UsageError` naming `flag`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{flag} {address}: want HOST:PORT, for example {example}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_unbound(error: OSError) -> str:
    """Returns why an address cannot be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return "another process listens there: stop it, or take another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address: take one it has, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return "ports this low are for root: take one from 1024 on"
    if isinstance(error, socket.gaierror):
        return "no such host is known here"
    return error.strerror or str(error)


def check_unused(address: str, flag: str) -> None:
    """Raises `UsageError` where `address` cannot be listened on. It is free again afterwards."""
    host, port = split_address(address, flag)
    first_error: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"{flag} {address}: cannot bind: {why_unbound(error)}") from error
    for family, kind, protocol, _, where in found:  # a name may have addresses that are not usable
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                return
            except OSError as error:
                first_error = first_error or error
    if first_error is not None:
        raise UsageError(f"{flag} {address}: cannot bind: {why_unbound(first_error)}") from first_error
