"""Creates TLS certificates of a temporary authority, and tokens, for a verifier of ours and its edges.

A link may hand out any address for the verifier's: edges check the certificate for the name `localhost`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from outrider.cloud_verifier.security.dev_certs import DevCertificates, make_dev_certificates
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.security.tokens import new_token
from outrider.edge_client.transport.link.security import LinkSecurity

SERVER_NAME = "localhost"
LIFETIME = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class DevSecurity:
    """Holds the certificates and tokens of a verifier and its edges."""

    certificates: DevCertificates
    tokens_file: Path  # the verifier's
    token_file: Path  # the edge's

    @property
    def serve_settings(self) -> dict[str, str]:
        """Returns the keys of the verifier's `ServeConfig`."""
        certificate, key = self.certificates.server
        return {"tls_cert": str(certificate), "tls_key": str(key), "tokens": str(self.tokens_file)}

    @property
    def edge_settings(self) -> dict[str, str]:
        """Returns the keys of the edge's `RunConfig`."""
        ca, token_file = str(self.certificates.ca), str(self.token_file)
        return {"tls_ca": ca, "tls_server_name": SERVER_NAME, "token_file": token_file}

    @property
    def serve_flags(self) -> list[str]:
        """Returns `serve_settings` as flags."""
        return _flags(self.serve_settings)

    @property
    def edge_flags(self) -> list[str]:
        """Returns `edge_settings` as flags."""
        return _flags(self.edge_settings)

    @property
    def link(self) -> LinkSecurity:
        """Returns what a `GrpcLink` made here needs."""
        return LinkSecurity(
            is_tls=True, ca=self.certificates.ca, server_name=SERVER_NAME, token_file=self.token_file
        )


def make_dev_security(directory: Path, tenant: str = "default") -> DevSecurity:
    """Writes everything to `directory`; a second call adds a token, for another tenant for example."""
    certificates = make_dev_certificates(directory, lifetime=LIFETIME)
    text, record = new_token(tenant, datetime.now(UTC), LIFETIME)
    tokens_file, token_file = directory / "tokens.json", directory / f"{tenant}-{record.id}.token"
    change_tokens(tokens_file, lambda records: (*records, record))
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
    return DevSecurity(certificates, tokens_file, token_file)


def _flags(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
