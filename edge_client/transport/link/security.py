"""The security of a link: TLS, a client certificate, a token.

Files are read at each connection, so that a renewed certificate or token is used without a restart.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outrider.common.errors import UsageError
from outrider.edge_client.transport.link.targets import check_names, parse_target

_TOKEN_PREFIX = "outrider_"
Metadata = tuple[tuple[str, str], ...]


class SecurityOptions(Protocol):
    """The security flags of a command that connects (`RunConfig` has them)."""

    @property
    def tls(self) -> bool: ...
    @property
    def tls_ca(self) -> Path | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_server_name(self) -> str: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def token(self) -> str: ...
    @property
    def insecure_token(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """The checked settings. `ca` of None means this machine's own authorities. Without `is_tls` the other TLS
    settings have no effect."""

    is_tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token_file: Path | None = None
    token: str = field(default="", repr=False)

    def roots(self) -> bytes | None:
        """Returns the authorities in PEM; None, for gRPC's own, where this machine has no file of them."""
        if self.ca is not None:
            return _read(self.ca, "--tls-ca")
        of_system = ssl.get_default_verify_paths().cafile
        return Path(of_system).read_bytes() if of_system else None

    def client_pair(self) -> tuple[bytes | None, bytes | None]:
        """Returns the key and the certificate chain, or twice None."""
        if self.certificate is None or self.key is None:
            return None, None
        return _read(self.key, "--tls-key"), _read(self.certificate, "--tls-cert")

    def metadata(self) -> Metadata:
        """Returns the headers of each call. Raises `UsageError` for a token file that cannot be used."""
        token = self.token if self.token_file is None else _read_token(self.token_file)
        return (("authorization", f"Bearer {token}"),) if token else ()


PLAINTEXT = LinkSecurity()


def link_security(options: SecurityOptions, address: str) -> LinkSecurity:
    """Makes the settings from a command's flags. Raises `UsageError`, also for a token that would travel
    unencrypted."""
    if options.tls_cert is not None and options.tls_key is None:
        raise UsageError(f"--tls-cert {options.tls_cert}: needs its private key, --tls-key FILE")
    if options.tls_key is not None and options.tls_cert is None:
        raise UsageError(f"--tls-key {options.tls_key}: needs its certificate, --tls-cert FILE")
    is_tls = options.tls or options.tls_ca is not None or options.tls_cert is not None
    if options.tls_server_name and not is_tls:
        raise UsageError("--tls-server-name: without TLS no name is checked; add --tls or --tls-ca FILE")
    if options.token_file is not None and options.token:
        raise UsageError("--token-file: the environment or the file of --config has a token too; drop one")
    security = LinkSecurity(
        is_tls,
        options.tls_ca,
        options.tls_cert,
        options.tls_key,
        options.tls_server_name,
        options.token_file,
        options.token,
    )
    if is_tls:  # read once here, so that mistakes are reported before anything is sent
        security.roots()
        security.client_pair()
    target = parse_target(address)
    if is_tls and not options.tls_server_name:
        check_names(target)
    if security.metadata() and not is_tls and not options.insecure_token and not target.is_loopback:
        raise UsageError(
            f"--verifier {address}: the token would travel unencrypted; add --tls or --tls-ca FILE, "
            "or --insecure-token if the network is yours and trusted"
        )
    return security


def _read_token(path: Path) -> str:
    if path.name.startswith(_TOKEN_PREFIX):  # "--token X" is short for --token-file to argparse
        raise UsageError(
            "--token-file: wants a file, not the token: everybody on this machine can see a command line. "
            "Write it to a file of mode 0600, and take another token if others may have seen this one"
        )
    try:
        token = _read(path, "--token-file").decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"--token-file {path}: holds no token; it wants the one line `token new` printed")
    return token


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot read it: {error.strerror}") from error
