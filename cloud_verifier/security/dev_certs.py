"""A local authority and the certificates it signs, to try TLS with: `cloud-verifier cert dev`.

The authority is kept, so that certificates made again later need no change at the edges. Its key is stored
unencrypted in the directory: trust it only on machines for trials.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.common.errors import UsageError

AUTHORITY_DAYS = 365
LEAF_DAYS = 30
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SKEW = timedelta(minutes=5)  # for clocks that are slow
_AUTHORITY_NAME = "Outrider development authority"
_CERTIFICATES = ("ca.crt", "server.crt", "client.crt")
_LEAF_FILES = ("server.crt", "server.key", "client.crt", "client.key")

Signer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


@dataclass(frozen=True, slots=True)
class DevCertificates:
    """Holds the paths of PEM files; keys have mode 0600."""

    directory: Path
    expires: datetime  # of server and client; the authority lasts longer
    is_authority_kept: bool = False  # edges that know it need no change
    replaced: tuple[str, ...] = ()  # names of the files that were there before

    @property
    def ca(self) -> Path:
        """Returns the path of the authority's certificate."""
        return self.directory / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        """Returns the paths of the server's certificate and key."""
        return self.directory / "server.crt", self.directory / "server.key"

    @property
    def client(self) -> tuple[Path, Path]:
        """Returns the paths of the client's certificate and key."""
        return self.directory / "client.crt", self.directory / "client.key"


def make_dev_certificates(
    directory: Path,
    hosts: Sequence[str] = (),
    tenant: str = "default",
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    lifetime: timedelta = timedelta(days=LEAF_DAYS),
) -> DevCertificates:
    """Writes ca, server and client to `directory`; an authority that is there already is kept.

    The server's is for this machine's loopback names and `hosts` (names or IP addresses), the client's common
    name is `tenant`. Raises `UsageError` for a malformed host, and for a directory that cannot be used, or
    that holds certificates which this function did not make.
    """
    now = clock()
    names = [_general_name(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts))]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_ours(directory)
        replaced = tuple(each for each in _LEAF_FILES if (directory / each).exists())
        authority, is_kept = _authority(directory, now)
        expires = min(now + lifetime, authority[0].not_valid_after_utc)
        made = DevCertificates(directory, expires, is_kept, replaced)
        host = hosts[0] if hosts else LOCAL_HOSTS[0]
        _write_pair(made.server, _sign(authority, host, names, now, made.expires, is_server=True))
        client_names = [x509.DNSName("client")]
        _write_pair(made.client, _sign(authority, tenant, client_names, now, made.expires, is_server=False))
    except OSError as error:
        raise UsageError(f"--dir {directory}: cannot write there: {error.strerror}") from error
    return made


def _check_ours(directory: Path) -> None:
    for name in _CERTIFICATES:
        path = directory / name
        try:
            issuer = x509.load_pem_x509_certificate(path.read_bytes()).issuer.rfc4514_string()
        except FileNotFoundError:
            continue
        except ValueError:
            issuer = ""
        if _AUTHORITY_NAME not in issuer:
            what = f"{name} there was not made by `cert dev`; name another directory, or move it away"
            raise UsageError(f"--dir {directory}: {what}")


def _authority(directory: Path, now: datetime) -> tuple[Signer, bool]:
    certificate_path, key_path = directory / "ca.crt", directory / "ca.key"
    if certificate_path.exists() and key_path.exists():
        try:
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            what = "ca.crt and ca.key there cannot be read; remove them"
            raise UsageError(f"--dir {directory}: {what}") from error
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.not_valid_after_utc > now:
            return (certificate, key), True
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"{_AUTHORITY_NAME} {now:%Y-%m-%d %H:%M}")
    builder = _builder(name, name, key, now, now + timedelta(days=AUTHORITY_DAYS))
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair((certificate_path, key_path), (certificate, key))
    return (certificate, key), False


def _sign(
    authority: Signer,
    common_name: str,
    names: Sequence[x509.GeneralName],
    now: datetime,
    expires: datetime,
    *,
    is_server: bool,
) -> Signer:
    issuer, issuer_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        _builder(_name(common_name), issuer.subject, key, now, expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, expires: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(expires)
    )


def _key_usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii() or any(c.isspace() or c in ":/," for c in host):
        raise UsageError(f"--host {host}: want a name or an IP address, without a port")
    return x509.DNSName(host)


def _write_pair(paths: tuple[Path, Path], pair: Signer) -> None:
    """Writes the key first: a server that reads between the two finds no pair and keeps its own."""
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(paths[1], pair[1].private_bytes(pem, pkcs8, serialization.NoEncryption()), 0o600)
    _write(paths[0], pair[0].public_bytes(pem), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes beside `path` and renames: half a file, or a key before it has its mode, is never read."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    os.replace(beside, path)
