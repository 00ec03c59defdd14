"""Diagnosing why a connection failed, by a socket of our own, in a message that names the fix.

gRPC reports "failed to connect" for most causes. Only called after a failure, so its cost does not matter.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.common.errors import UsageError
from outrider.edge_client.transport.link.security import LinkSecurity
from outrider.edge_client.transport.link.targets import parse_target

# OpenSSL's numbers (X509_V_ERR_...).
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME, _WRONG_IP = 9, 10, 62, 64
_HTTP2_ALPN = ["h2"]
_MAX_READ_BYTES = 16_384
_FRAME_HEADER_BYTES = 9  # of SETTINGS, which an HTTP/2 server sends first

_Done = TypeVar("_Done")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Names what is wrong and, where it is known, what to do. `is_fault`: waiting does not repair it, only a
    change of the configuration does."""

    found: str
    fix: str = ""
    is_fault: bool = True


def diagnose(address: str, security: LinkSecurity, timeout_s: float) -> Diagnosis | None:
    """Returns what is wrong between here and `address`; None when nothing is, as far as this can see.

    Of several verifiers it returns the first one's diagnosis, a fault only where no other can serve.
    """
    addresses = parse_target(address).addresses
    several = [_diagnose_one(host, port, security, timeout_s) for host, port in addresses]
    found = [each for each in several if each is not None]
    if len(found) < len(several):
        return None
    return Diagnosis(found[0].found, found[0].fix, all(each.is_fault for each in found))


def _diagnose_one(host: str, port: int, security: LinkSecurity, timeout_s: float) -> Diagnosis | None:
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except ConnectionRefusedError:
        return Diagnosis("connection refused: no verifier listens there", is_fault=False)
    except (socket.gaierror, UnicodeError):  # the latter: not a valid name, with an empty label for example
        return Diagnosis("there is no such host", is_fault=False)
    except OSError as error:
        return Diagnosis(f"no connection: {error.strerror or error}", is_fault=False)
    with connection:
        if security.is_tls:
            return _check_tls(connection, host, security)
        return _check_plaintext(connection, host)


def _check_plaintext(connection: socket.socket, host: str) -> Diagnosis | None:
    """Checks, after plain gRPC failed, whether the other side speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent
    context.set_alpn_protocols(_HTTP2_ALPN)
    try:
        _Tls(connection, context, host).handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # an alert is TLS too
            return None
    except OSError:
        return None
    return Diagnosis("it speaks TLS and this edge does not", "add --tls-ca FILE with its authority, or --tls")


class _Tls:
    """TLS over a socket by hand: `wrap_socket` leaves it open where the other side resets it at once."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def handshake(self) -> None:
        self._until_done(self._tls.do_handshake)

    def first_frame(self) -> bytes:
        """Returns the first bytes of the other side; none where it hangs up instead."""
        try:
            return self._until_done(lambda: self._tls.read(_FRAME_HEADER_BYTES))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return b""

    def _until_done(self, step: Callable[[], _Done]) -> _Done:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
            if data := self._connection.recv(_MAX_READ_BYTES):
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def _check_tls(connection: socket.socket, host: str, security: LinkSecurity) -> Diagnosis | None:
    name = security.server_name or host
    try:
        context = _context(security)
    except UsageError as error:
        return Diagnosis(str(error))
    except ssl.SSLError:
        return _unusable(security)
    try:
        tls = _Tls(connection, context, name)
        tls.handshake()
        if not tls.first_frame():  # under TLS 1.3 the server checks our certificate only now
            return _hang_up(security)
    except ssl.SSLCertVerificationError as error:
        return _verification_fault(error, name, security)
    except ssl.SSLError as error:
        return _tls_fault(error.reason or "", security)
    except OSError:
        return None
    return None


def _context(security: LinkSecurity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(_HTTP2_ALPN)
    if security.ca is not None:
        context.load_verify_locations(cadata=(security.roots() or b"").decode("ascii", "replace"))
    else:
        context.load_default_certs()
    if security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    return context


def _unusable(security: LinkSecurity) -> Diagnosis:
    given = {"--tls-ca": security.ca, "--tls-cert": security.certificate, "--tls-key": security.key}
    files = ", ".join(f"{flag} {path}" for flag, path in given.items() if path is not None)
    return Diagnosis(
        f"{files}: cannot be used", "want PEM, and the key of the certificate, without a password"
    )


def _verification_fault(error: ssl.SSLCertVerificationError, name: str, security: LinkSecurity) -> Diagnosis:
    match error.verify_code:
        case code if code in (_WRONG_NAME, _WRONG_IP):
            fix = "dial a name it has, or say one with --tls-server-name"
            return Diagnosis(f"its certificate is not for {name}", fix)
        case code if code == _EXPIRED:
            fix = "renew it there (or this machine's clock is wrong)"
            return Diagnosis("its certificate has expired", fix)
        case code if code == _NOT_YET_VALID:
            return Diagnosis("its certificate is not valid yet", "is this machine's clock right?")
    if security.ca is None:
        found = "this machine's authorities do not vouch for its certificate"
        return Diagnosis(found, "name its own with --tls-ca FILE")
    found = f"--tls-ca {security.ca} is not the authority of its certificate ({error.verify_message})"
    return Diagnosis(found, "name the file of the one that signed it")


def _hang_up(security: LinkSecurity) -> Diagnosis:
    """Asks for the likely cause: gRPC's servers give none, and an overloaded one would do the same."""
    if security.certificate is None:
        question = "does it want a client certificate (--tls-cert and --tls-key)?"
    else:
        question = f"does it know the authority of --tls-cert {security.certificate}?"
    return Diagnosis("it hangs up after the handshake", question, is_fault=False)


def _tls_fault(reason: str, security: LinkSecurity) -> Diagnosis | None:
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        fix = "serve with --tls-cert and --tls-key there, or drop --tls and --tls-ca here"
        return Diagnosis("it does not speak TLS", fix)
    if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not security.certificate):
        return Diagnosis("it wants a client certificate", "add --tls-cert FILE and --tls-key FILE")
    if "ALERT" in reason and security.certificate is not None:
        what = reason.rpartition("ALERT_")[2].replace("_", " ").lower()
        found = f"it does not accept the client certificate {security.certificate} ({what})"
        return Diagnosis(found, "take one that the authority of its --tls-client-ca signed")
    return Diagnosis(f"TLS fails: {reason.replace('_', ' ').lower()}") if reason else None
