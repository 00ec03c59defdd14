"""Addresses as both commands take them: HOST:PORT, and whether that stays on this machine."""

from __future__ import annotations

import ipaddress

from common.errors import UsageError


def split_address(address: str, flag: str, example: str = "127.0.0.1:7077") -> tuple[str, int]:
    """Host (without the brackets of IPv6) and port. Raises `UsageError` naming `flag`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{flag} {address}: want HOST:PORT, for example {example}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
