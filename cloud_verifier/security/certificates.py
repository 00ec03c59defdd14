"""The verifier's certificate, its key and its clients' authority: checked, and loaded again on change.

gRPC asks for them at every handshake, so a change applies to connections made from then on; open ones keep
theirs. Files that do not belong together (one is not written yet, say) change nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from outrider.cloud_verifier.security.files import FileWatch, check_key_mode, read_file
from outrider.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """Holds the paths of PEM files."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class ServerCertificates:
    """Holds loaded certificates. Raises `ConfigError` where the files cannot be used."""

    def __init__(self, paths: TlsPaths, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._paths = paths
        self._clock = clock
        files = [paths.certificate, paths.key, *([paths.client_ca] if paths.client_ca else [])]
        self._watch = FileWatch(files)
        self._waits_until: datetime | None = None  # for a renewed certificate that is not valid before
        self.load()

    def load(self) -> None:
        """Reads the files; raises `ConfigError` and keeps the previous ones where they cannot be used."""
        paths = self._paths
        chain, key = read_file(paths.certificate, "--tls-cert"), read_file(paths.key, "--tls-key")
        client_ca = None if paths.client_ca is None else read_file(paths.client_ca, "--tls-client-ca")
        begins, expires = _check_pair(chain, key, paths)
        self._check_times(begins, expires)
        if client_ca is not None:
            _parse_certificates(client_ca, f"--tls-client-ca {paths.client_ca}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(paths.certificate, paths.key)
        except OSError as error:  # replaced since we read them
            raise ConfigError(f"--tls-cert {paths.certificate}: cannot be used: {error}") from error
        check_key_mode(paths.key)  # once they can be used: they are tried again where they cannot
        self._waits_until = None
        self.expires = expires
        self.http_context = context  # of the admin port
        self._config = grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=client_ca)

    def reload(self, is_forced: bool = False) -> bool:
        """Loads changed files, and those that have become valid since, and returns whether there were any.

        Raises `ConfigError` and keeps the previous ones where they cannot be used; the next call tries again.
        """
        is_valid_now = self._waits_until is not None and self._clock() >= self._waits_until
        if not (self._watch.has_changed() or is_forced or is_valid_now):
            return False
        self.load()
        self._watch.accept()
        return True

    def grpc_credentials(self) -> Any:
        """Returns credentials for `add_secure_port`.

        With a clients' authority, a client without its certificate is refused.
        """
        handed_out = self._config

        def fetch() -> Any:  # on a thread of gRPC's, at each handshake; None is "as before"
            nonlocal handed_out
            if handed_out is self._config:
                return None
            handed_out = self._config
            return handed_out

        is_mutual = self._paths.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(handed_out, fetch, require_client_authentication=is_mutual)

    def _check_times(self, begins: datetime, expires: datetime) -> None:
        flag, now = f"--tls-cert {self._paths.certificate}", self._clock()
        if begins > now:
            self._waits_until = begins
            self._watch.accept()  # until then there is nothing to try again
            raise ConfigError(f"{flag}: is valid from {begins:%Y-%m-%d %H:%M} UTC only")
        if expires <= now:
            raise ConfigError(f"{flag}: expired at {expires:%Y-%m-%d %H:%M} UTC; renew it")


def _check_pair(chain: bytes, key: bytes, paths: TlsPaths) -> tuple[datetime, datetime]:
    """Returns from when until when the first certificate is valid."""
    certificate = _parse_certificates(chain, f"--tls-cert {paths.certificate}")[0]
    try:
        private_key = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"--tls-key {paths.key}: is no PEM private key without a password") from error
    if _spki(private_key.public_key()) != _spki(certificate.public_key()):
        raise ConfigError(f"--tls-key {paths.key}: is not the key of --tls-cert {paths.certificate}")
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _parse_certificates(pem: bytes, flag: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{flag}: holds no PEM certificate") from error


def _spki(key: Any) -> bytes:
    spki: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return spki
