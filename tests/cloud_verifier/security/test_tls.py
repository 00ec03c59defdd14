"""A verifier over TLS: with a token, with client certificates, and while its certificates change."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import Caller, Stream, bearer, eventually, plain_channel, status_of, tls_channel
from support.dev_security import make_dev_security
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.certificates import ServerCertificates, TlsPaths
from outrider.cloud_verifier.security.dev_certs import DevCertificates, make_dev_certificates
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.security.tokens import new_token
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.errors import ConfigError
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic

SESSION_ID = bytes(range(16))
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def make_token(path: Path, tenant: str) -> str:
    text, record = new_token(tenant, datetime.now(UTC), None)
    change_tokens(path, lambda old: (*old, record))
    return text


def tls_config(made: DevCertificates, is_mutual: bool = False, tokens: Path | None = None) -> ServeConfig:
    certificate, key = made.server
    client_ca = made.ca if is_mutual else None
    return ServeConfig(tls_cert=certificate, tls_key=key, tls_client_ca=client_ca, tokens=tokens)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DevCertificates:
    return make_dev_certificates(tmp_path_factory.mktemp("certs"), tenant="acme")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> DevCertificates:
    """Of another authority."""
    return make_dev_certificates(tmp_path_factory.mktemp("foreign"), tenant="acme")


# --------------------------------------------------------------------------------- TLS and a token


def test_a_token_over_tls_opens_a_session_and_plaintext_gets_nowhere(
    made: DevCertificates, tmp_path: Path
) -> None:
    token = make_token(tmp_path / "t", "acme")
    with serving(FakeBackend(), tls_config(made, tokens=tmp_path / "t")) as server:
        for host in ("localhost", "127.0.0.1"):
            with tls_channel(server.port, made.ca, host=host) as channel:
                caller = Caller(channel, SESSION_ID, bearer(token))
                opened = caller.open().opened
                assert caller.verify(opened, 1).verdict.position > opened.position and caller.close()
                nobody = Caller(channel, SESSION_ID)
                assert status_of(nobody.open)[0] is grpc.StatusCode.UNAUTHENTICATED
        with plain_channel(server.port) as channel:
            assert status_of(Caller(channel, SESSION_ID, bearer(token)).open)[0] is UNAVAILABLE
        assert not len(server.engine.sessions)


def test_old_versions_of_tls_are_refused(made: DevCertificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(made.ca)
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        serving(FakeBackend(), tls_config(made)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        context.wrap_socket(connection, server_hostname="localhost")


# ----------------------------------------------------------------------------- client certificates


@dataclass
class Mutual:
    server: VerifierServer
    made: DevCertificates

    def channel(self, of: DevCertificates) -> grpc.Channel:
        return tls_channel(self.server.port, self.made.ca, *of.client)


def client_of(made: DevCertificates, tenant: str, tmp_path: Path) -> DevCertificates:
    """A client of the same authority with another common name."""
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).write_bytes((made.directory / name).read_bytes())
    return make_dev_certificates(tmp_path, tenant=tenant)


@pytest.fixture
def mutual(made: DevCertificates) -> Iterator[Mutual]:
    with serving(FakeBackend(), tls_config(made, is_mutual=True)) as server:
        yield Mutual(server, made)


def test_the_common_name_of_a_client_certificate_is_its_tenant(
    mutual: Mutual, made: DevCertificates, tmp_path: Path
) -> None:
    with mutual.channel(made) as ours, mutual.channel(client_of(made, "other", tmp_path)) as theirs:
        stream = Stream(Caller(ours, SESSION_ID))
        opened = stream.open(SESSION_ID)
        assert [session.tenant for session in mutual.server.engine.sessions] == ["acme"]
        foreign = Caller(theirs, SESSION_ID)
        assert foreign.verify(opened, 1).error.position == 0 and not foreign.close()
        assert stream.verify(opened, 1).position > opened.position
        health = health_pb2_grpc.HealthStub(theirs)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        header = (("x-outrider-tenant", "acme"),)
        assert status_of(Caller(theirs, SESSION_ID, header).open)[0] is grpc.StatusCode.PERMISSION_DENIED
        stream.close()


def test_without_a_client_certificate_of_the_authority_there_is_no_connection(
    mutual: Mutual, made: DevCertificates, foreign: DevCertificates
) -> None:
    with tls_channel(mutual.server.port, made.ca) as channel:
        assert status_of(Caller(channel, SESSION_ID).open)[0] is UNAVAILABLE
    with mutual.channel(foreign) as channel:
        assert status_of(Caller(channel, SESSION_ID).open)[0] is UNAVAILABLE


def test_a_servers_certificate_is_none_of_a_client(mutual: Mutual, made: DevCertificates) -> None:
    with tls_channel(mutual.server.port, made.ca, *made.server) as channel:
        assert status_of(Caller(channel, SESSION_ID).open)[0] is UNAVAILABLE


def test_a_common_name_that_is_no_tenant_is_denied(
    mutual: Mutual, made: DevCertificates, tmp_path: Path
) -> None:
    with mutual.channel(client_of(made, "a b", tmp_path)) as channel:
        status, details = status_of(Caller(channel, SESSION_ID).open)
    assert status is grpc.StatusCode.PERMISSION_DENIED and "common name" in details


def test_beside_a_token_the_certificate_opens_the_connection_and_the_token_names_the_tenant(
    made: DevCertificates, tmp_path: Path
) -> None:
    token = make_token(tmp_path / "t", "of-the-token")
    config = tls_config(made, is_mutual=True, tokens=tmp_path / "t")
    with serving(FakeBackend(), config) as server, tls_channel(server.port, made.ca, *made.client) as channel:
        assert status_of(Caller(channel, SESSION_ID).open)[0] is grpc.StatusCode.UNAUTHENTICATED
        Caller(channel, SESSION_ID, bearer(token)).open()
        assert [session.tenant for session in server.engine.sessions] == ["of-the-token"]


# --------------------------------------------------------------------------------------- reloading


def serial_of(port: int, ca: Path) -> int:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def serial_in(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_a_renewed_certificate_is_shown_to_new_connections_and_open_sessions_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    made = make_dev_certificates(tmp_path)
    with serving(FakeBackend(), tls_config(made)) as server, tls_channel(server.port, made.ca) as channel:
        stream = Stream(Caller(channel, SESSION_ID))
        opened = stream.open(SESSION_ID)
        before = serial_in(made.server[0])
        assert serial_of(server.port, made.ca) == before
        make_dev_certificates(tmp_path)
        after = serial_in(made.server[0])
        assert after != before and eventually(lambda: serial_of(server.port, made.ca) == after)
        verdict = stream.verify(opened, 1)
        assert verdict.position > opened.position, "the open stream was not touched"
        with tls_channel(server.port, made.ca) as other:
            assert Caller(other, SESSION_ID).verify(verdict, 2).verdict.position > verdict.position
        stream.close()


def test_a_pair_that_is_half_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    made, newer = make_dev_certificates(tmp_path / "a"), make_dev_certificates(tmp_path / "b")
    with serving(FakeBackend(), tls_config(made)) as server:
        before = serial_of(server.port, made.ca)
        os.replace(newer.server[0], made.server[0])
        assert eventually(lambda: "is not the key of" in caplog.text)
        assert serial_of(server.port, made.ca) == before
        os.replace(newer.server[1], made.server[1])
        expected = serial_in(made.server[0])
        assert eventually(lambda: _shows(server.port, newer.ca, expected))


def _shows(port: int, ca: Path, serial: int) -> bool:
    try:
        return serial_of(port, ca) == serial
    except ssl.SSLError:
        return False


def test_another_authority_of_clients_is_taken_up_too(
    foreign: DevCertificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    made = make_dev_certificates(tmp_path)
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(made.ca.read_bytes())
    config = ServeConfig(tls_cert=made.server[0], tls_key=made.server[1], tls_client_ca=client_ca)
    with serving(FakeBackend(), config) as server:

        def describes(of: DevCertificates) -> bool:
            with tls_channel(server.port, made.ca, *of.client) as channel:
                try:
                    return bool(Caller(channel, SESSION_ID).open())
                except grpc.RpcError:
                    return False

        assert describes(made) and not describes(foreign)
        client_ca.write_bytes(foreign.ca.read_bytes())
        assert eventually(lambda: describes(foreign)) and not describes(made)


def test_sighup_takes_up_everything_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    security = make_dev_security(tmp_path)
    said = ""

    def has_said(words: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return words in said

    flags = (*security.serve_flags, "--log-level", "info")
    with running_synthetic(SyntheticPair(), *flags) as verifier:
        link = GrpcLink(verifier.address, SESSION_ID, security=security.link)
        link.describe(10.0)
        verifier.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: has_said("took up tokens")) and "took up certificates" in said
        link.describe(10.0)
    assert verifier.process.returncode == 0


# ------------------------------------------------------------------------------- files at the start


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("server.crt", None, "--tls-cert .*: cannot read it"),
        ("server.key", None, "--tls-key .*: cannot read it"),
        ("ca.crt", None, "--tls-client-ca .*: cannot read it"),
        ("server.crt", b"nonsense", "--tls-cert .*: holds no PEM certificate"),
        ("server.key", b"nonsense", "--tls-key .*: is no PEM private key"),
        ("ca.crt", b"", "--tls-client-ca .*: holds no PEM certificate"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    made = make_dev_certificates(tmp_path)
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        ServerCertificates(TlsPaths(*made.server, made.ca))


def test_another_key_an_expired_certificate_and_one_to_come_are_refused(
    made: DevCertificates, foreign: DevCertificates
) -> None:
    with pytest.raises(ConfigError, match="is not the key of --tls-cert"):
        ServerCertificates(TlsPaths(made.server[0], foreign.server[1]))
    with pytest.raises(ConfigError, match=r"expired at .* renew it"):
        ServerCertificates(TlsPaths(*made.server), clock=lambda: datetime.now(UTC) + timedelta(days=31))
    with pytest.raises(ConfigError, match="is valid from"):
        ServerCertificates(TlsPaths(*made.server), clock=lambda: datetime.now(UTC) - timedelta(days=1))


def test_a_renewed_certificate_is_taken_up_when_it_becomes_valid(tmp_path: Path) -> None:
    """Its files do not change again."""
    now = datetime.now(UTC)
    made = make_dev_certificates(tmp_path)
    certificates = ServerCertificates(TlsPaths(*made.server), clock=lambda: now)
    before = certificates.expires
    make_dev_certificates(tmp_path, clock=lambda: now + timedelta(days=2))
    with pytest.raises(ConfigError, match="is valid from"):
        certificates.reload()
    assert not certificates.reload() and certificates.expires == before, "it is said once"
    now += timedelta(days=3)
    assert certificates.reload() and certificates.expires > before
    assert not certificates.reload()


def test_a_key_that_all_may_read_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_dev_certificates(tmp_path)
    ServerCertificates(TlsPaths(*made.server))
    assert not caplog.records
    made.server[1].chmod(0o644)
    ServerCertificates(TlsPaths(*made.server))
    assert "everybody on this machine may read a private key" in caplog.text
