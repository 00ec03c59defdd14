"""The value of `--verifier`: one verifier, or several that share the sessions.

HOST:PORT              one
HOST:PORT,HOST:PORT    these
dns:///HOST:PORT       all present addresses of the name, of a headless service for example
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from outrider.common.config.addresses import is_loopback, split_address
from outrider.common.errors import LinkError, UsageError

DNS = "dns:///"
_MAX_TRIES = 3  # verifiers that one connection tries before it fails
_FORMS = "127.0.0.1:7077; or several: A:7077,B:7077 or dns:///NAME:7077"


@dataclass(frozen=True, slots=True)
class VerifierTarget:
    """A parsed `--verifier`. `addresses` are hosts and ports as they were given."""

    text: str
    addresses: tuple[tuple[str, int], ...]
    is_name: bool = False

    @property
    def is_balanced(self) -> bool:
        return self.is_name or len(self.addresses) > 1

    @property
    def is_loopback(self) -> bool:
        return all(is_loopback(host) for host, _ in self.addresses)

    @property
    def num_tries(self) -> int:
        """Returns how many verifiers one attempt to connect may try."""
        return _MAX_TRIES if self.is_name else min(len(self.addresses), _MAX_TRIES)

    def tls_name(self, server_name: str) -> str:
        """Returns the name that certificates must have, the user's where given; empty is that of `grpc_name`."""
        return server_name or (self.addresses[0][0] if len(self.addresses) > 1 else "")

    def grpc_name(self) -> str:
        """Returns the target in gRPC's form. Raises `LinkError` where no host of a list has an address."""
        if len(self.addresses) == 1:
            return self.text
        found = {each for host, port in self.addresses for each in _resolve(host, port)}
        if not found:
            raise LinkError(f"cannot connect to a verifier at {self.text}: there is no such host")
        # A channel takes addresses of one family.
        family = "ipv4" if any(family == "ipv4" for family, _ in found) else "ipv6"
        return f"{family}:" + ",".join(sorted(address for each, address in found if each == family))


def parse_target(text: str) -> VerifierTarget:
    """Parses the value. Raises `UsageError` naming `--verifier`."""
    is_name = text.startswith(DNS)
    parts = [text.removeprefix(DNS)] if is_name else [part.strip() for part in text.split(",")]
    addresses = tuple(split_address(part, "--verifier", _FORMS) for part in parts)
    if not all(port for _, port in addresses):
        raise UsageError(f"--verifier {text}: want HOST:PORT with a port above 0, for example {_FORMS}")
    return VerifierTarget(text, addresses, is_name)


def check_names(target: VerifierTarget) -> None:
    """Raises `UsageError` for hosts with different names: a connection checks certificates for one name."""
    if len({host for host, _ in target.addresses}) > 1:
        raise UsageError(
            f"--verifier {target.text}: over TLS several hosts need one name that all their certificates "
            "have: say it with --tls-server-name, or name them as dns:///NAME:PORT"
        )


def _resolve(host: str, port: int) -> list[tuple[str, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: not a valid name, with an empty label for example
        return []  # another of the list may have an address
    return [
        ("ipv6", f"[{address[0]}]:{port}") if family == socket.AF_INET6 else ("ipv4", f"{address[0]}:{port}")
        for family, _, _, _, address in found
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
