"""The edge's side: faults of TLS and tokens by name with the fix, and what it may not send."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.calls import eventually
from support.dev_security import DevSecurity, make_dev_security
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.fakes import FakeBackend
from support.processes.server import serving
from support.processes.tcp_peers import tcp_server

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.dev_certs import DevCertificates, make_dev_certificates
from outrider.cloud_verifier.security.token_file import change_tokens, read_tokens
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.errors import LinkError, LinkFaultError, UsageError
from outrider.common.types import OpenRequest, SamplingParams
from outrider.edge_client.commands.cli import main
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.transport.connection import ConnectionManager
from outrider.edge_client.transport.link.base import CallRejectedError
from outrider.edge_client.transport.link.channel import open_channel
from outrider.edge_client.transport.link.diagnosis import diagnose
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.link.security import PLAINTEXT, LinkSecurity, link_security

SESSION_ID = bytes(range(16))


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> DevSecurity:
    return make_dev_security(tmp_path_factory.mktemp("security"), "acme")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> DevCertificates:
    return make_dev_certificates(tmp_path_factory.mktemp("foreign"))


def secured_config(security: DevSecurity) -> ServeConfig:
    certificate, key = security.certificates.server
    return ServeConfig(tls_cert=certificate, tls_key=key, tokens=security.tokens_file)


@pytest.fixture(scope="module")
def server(security: DevSecurity) -> Iterator[VerifierServer]:
    with serving(FakeBackend(), secured_config(security)) as server:
        yield server


def fault(port: int, security: LinkSecurity, is_fault: bool = True) -> str:
    """What is said; `is_fault` where no patience mends it."""
    with pytest.raises(LinkError) as raised:
        open_channel(f"localhost:{port}", 5.0, security).close()
    assert isinstance(raised.value, LinkFaultError) is is_fault
    return str(raised.value)


# ----------------------------------------------------------------------------- faults by their name


@contextlib.contextmanager
def handshakes(context: ssl.SSLContext | None, says: bytes = b"") -> Iterator[int]:
    """A listener that shakes hands (where it has a context), says something and hangs up."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                wrapped = context.wrap_socket(connection, server_side=True) if context else connection
                wrapped.sendall(says)
                wrapped.recv(64)
                wrapped.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def server_context(made: DevCertificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made.server)
    context.set_alpn_protocols(["h2"])
    return context


def test_the_right_settings_connect(server: VerifierServer, security: DevSecurity) -> None:
    for host in ("localhost", "127.0.0.1"):
        link = GrpcLink(f"{host}:{server.port}", SESSION_ID, security=security.link)
        assert link.describe(5.0).model_id == "fake"


def test_plaintext_to_tls(server: VerifierServer) -> None:
    assert "it speaks TLS and this edge does not: add --tls-ca FILE" in fault(server.port, PLAINTEXT)


def test_plaintext_to_a_verifier_that_wants_client_certificates(security: DevSecurity) -> None:
    made = security.certificates
    config = ServeConfig(tls_cert=made.server[0], tls_key=made.server[1], tls_client_ca=made.ca)
    with serving(FakeBackend(), config) as server:
        assert "it speaks TLS and this edge does not" in fault(server.port, PLAINTEXT)
        without = LinkSecurity(is_tls=True, ca=made.ca)
        assert "does it want a client certificate (--tls-cert" in fault(server.port, without, is_fault=False)
        with_one = replace(without, certificate=made.client[0], key=made.client[1])
        assert GrpcLink(f"localhost:{server.port}", SESSION_ID, security=with_one).describe(5.0)


def test_a_client_certificate_of_another_authority(security: DevSecurity, foreign: DevCertificates) -> None:
    made = security.certificates
    config = ServeConfig(tls_cert=made.server[0], tls_key=made.server[1], tls_client_ca=made.ca)
    wrong = LinkSecurity(is_tls=True, ca=made.ca, certificate=foreign.client[0], key=foreign.client[1])
    with serving(FakeBackend(), config) as server:
        said = fault(server.port, wrong, is_fault=False)
    assert f"does it know the authority of --tls-cert {foreign.client[0]}?" in said


def test_tls_to_plaintext(security: DevSecurity) -> None:
    with serving(FakeBackend()) as server:
        assert "it does not speak TLS: serve with --tls-cert" in fault(server.port, security.link)


def test_a_web_server_is_no_verifier(security: DevSecurity) -> None:
    with handshakes(None, b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "it does not speak TLS" in fault(port, security.link)


def test_another_authority(server: VerifierServer, foreign: DevCertificates) -> None:
    said = fault(server.port, LinkSecurity(is_tls=True, ca=foreign.ca))
    assert f"--tls-ca {foreign.ca} is not the authority of its certificate" in said
    said = fault(server.port, LinkSecurity(is_tls=True))
    assert "this machine's authorities do not vouch for its certificate: name its own with --tls-ca" in said


def test_another_name(server: VerifierServer, security: DevSecurity) -> None:
    said = fault(server.port, replace(security.link, server_name="elsewhere"))
    assert "its certificate is not for elsewhere" in said and "--tls-server-name" in said


def test_an_address_that_the_certificate_does_not_have(tmp_path: Path, foreign: DevCertificates) -> None:
    config = ServeConfig(tls_cert=foreign.server[0], tls_key=foreign.server[1])
    with serving(FakeBackend(), config) as server:
        said = fault(server.port, LinkSecurity(is_tls=True, ca=foreign.ca, server_name="127.0.0.2"))
    assert "its certificate is not for 127.0.0.2" in said


@pytest.mark.parametrize(("days", "words"), [(-40, "its certificate has expired"), (1, "is not valid yet")])
def test_a_certificate_before_or_after_its_time(tmp_path: Path, days: int, words: str) -> None:
    made = make_dev_certificates(tmp_path, clock=lambda: datetime.now(UTC) + timedelta(days=days))
    with handshakes(server_context(made)) as port:
        assert words in fault(port, LinkSecurity(is_tls=True, ca=made.ca))


def test_files_that_are_none(server: VerifierServer, security: DevSecurity, tmp_path: Path) -> None:
    path = tmp_path / "nonsense.pem"
    path.write_text("nonsense")
    assert f"--tls-ca {path}: cannot be used: want PEM" in fault(server.port, LinkSecurity(True, path))
    made = security.certificates
    mixed = LinkSecurity(True, made.ca, certificate=made.client[0], key=made.server[1])
    assert "cannot be used: want PEM, and the key of the certificate" in fault(server.port, mixed)


@pytest.mark.parametrize("is_tls", [True, False])
def test_nobody_there_is_no_fault_of_tls_and_may_mend_itself(security: DevSecurity, is_tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkError, match="connection refused: no verifier listens there") as raised:
        open_channel(f"127.0.0.1:{port}", 5.0, security.link if is_tls else PLAINTEXT)
    assert not isinstance(raised.value, LinkFaultError)


def test_a_host_that_is_none_is_said_to_be(security: DevSecurity) -> None:
    with pytest.raises(LinkError, match=r"there is no such host|no answer"):
        open_channel("no-such-host.invalid:7077", 5.0, security.link)


@pytest.mark.parametrize("edge", [PLAINTEXT, LinkSecurity(is_tls=True)])
def test_what_resets_every_connection_costs_no_socket(edge: LinkSecurity) -> None:
    """Resets come at other moments of asking; a socket left open is a warning, which is an error here."""
    for_good = struct.pack("ii", 1, 0)
    with tcp_server(lambda peer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, for_good)) as address:
        for _ in range(20):
            diagnose(address, edge, 1.0)
    gc.collect()


def test_a_patient_edge_does_not_wait_for_a_fault_to_mend_itself(server: VerifierServer) -> None:
    connections = ConnectionManager(GrpcLink(f"localhost:{server.port}", SESSION_ID))
    with pytest.raises(LinkFaultError, match="it speaks TLS"):
        connections.connect(patience_s=3600.0)


# ------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_without_the_right_token_the_call_is_rejected_with_the_reason(
    server: VerifierServer, security: DevSecurity, transport: str
) -> None:
    unknown = f"outrider_{'0' * 12}_{'A' * 43}"
    for token, words in (("", "the call has no token"), (unknown, "no such token is known here")):
        link_settings = replace(security.link, token_file=None, token=token)
        link = GrpcLink(f"localhost:{server.port}", SESSION_ID, transport, link_settings)
        connection = link.connect(5.0)
        connection.send(OpenRequest(SESSION_ID, (5, 6, 7), 3, SamplingParams()))
        with pytest.raises(CallRejectedError, match=f"{words}.*--token-file"):
            while connection.receive(5.0) is None:
                pass
        connection.close()


def test_a_token_replaced_in_mid_text_is_taken_up_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    security = make_dev_security(tmp_path / "s", "acme")
    newer = make_dev_security(tmp_path / "s", "acme")
    draft = make_tiny_draft(tmp_path)
    backend = make_backend(draft)
    old_id = security.token_file.name.split("-")[1].removesuffix(".token")

    def replace_token() -> None:
        security.token_file.write_text(newer.token_file.read_text())
        now = datetime.now(UTC)
        change_tokens(
            security.tokens_file, lambda old: [replace(r, revoked=now) if r.id == old_id else r for r in old]
        )

    with serving(backend, replace(secured_config(security), min_forward_ms=5.0)) as server:
        flags = ["--verifier", f"localhost:{server.port}", *security.edge_flags, "--draft", str(draft)]
        flags += ["--max-new-tokens", "150", "--on-timeout", "wait", "--seed", "1", "--ignore-eos"]
        changer = threading.Thread(
            target=lambda: eventually(lambda: backend.num_forwards > 8, 20) and replace_token()
        )
        changer.start()
        assert main(["run", "def", *flags]) == 0, capsys.readouterr().err
        changer.join()
        assert server.security.num_refused["revoked"] == 0
    assert {r.id: r.revoked is not None for r in read_tokens(security.tokens_file)}[old_id]


def check(address: str = "verifier.example:7077", **changes: object) -> LinkSecurity:
    return link_security(run_config(**changes).connection, address)


def test_a_token_never_travels_in_the_clear_beyond_this_machine(security: DevSecurity) -> None:
    token_file = security.token_file
    for address in ("verifier.example:7077", "10.1.2.3:7077", "[2001:db8::1]:7077", "0.0.0.0:7077"):
        with pytest.raises(UsageError, match=r"the token would travel unencrypted; add --tls"):
            check(address, token_file=token_file)
        assert check(address, token_file=token_file, tls=True).metadata()
        assert check(address, token_file=token_file, insecure_token=True).metadata()
        assert check(address) == PLAINTEXT, "without a token plaintext is the operator's business"
    for address in ("127.0.0.1:7077", "localhost:7077", "[::1]:7077"):
        assert check(address, token_file=token_file).metadata()


def test_flags_that_do_not_go_together_are_named(security: DevSecurity, tmp_path: Path) -> None:
    made = security.certificates
    certificate, key = made.client
    empty, spaces = tmp_path / "empty", tmp_path / "spaces"
    empty.write_text("\n")
    spaces.write_text("two words\n")
    for changes, words in (
        ({"tls_cert": certificate}, "--tls-cert .*: needs its private key, --tls-key"),
        ({"tls_key": key}, "--tls-key .*: needs its certificate, --tls-cert"),
        ({"tls_server_name": "x"}, "--tls-server-name: without TLS"),
        ({"tls": True, "token": "t", "token_file": security.token_file}, "--token-file: .*drop one"),
        ({"tls": True, "token_file": tmp_path / "none"}, "--token-file .*none: cannot read it"),
        ({"tls": True, "token_file": empty}, "--token-file .*empty: holds no token"),
        ({"tls": True, "token_file": spaces}, "--token-file .*spaces: holds no token"),
        ({"tls": True, "token_file": made.client[0]}, "--token-file .*: holds no token"),
        ({"tls_ca": tmp_path / "none"}, "--tls-ca .*none: cannot read it"),
        ({"tls_cert": tmp_path / "none", "tls_key": key}, "--tls-cert .*none: cannot read it"),
    ):
        with pytest.raises(UsageError, match=words):
            check(**changes)
    assert check(tls_cert=certificate, tls_key=key).is_tls and check(tls_ca=made.ca).is_tls


def test_a_token_may_come_from_the_environment_and_has_no_flag(
    server: VerifierServer,
    security: DevSecurity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = security.token_file.read_text().strip()
    monkeypatch.setenv("OUTRIDER_EDGE_TOKEN", token)
    assert main(["config", "show", "--origin"]) == 0
    shown = capsys.readouterr().out
    assert "token: <secret>" in shown and token not in shown
    flags = ["--verifier", f"localhost:{server.port}", *security.edge_flags[:4]]
    assert main(["run", "x", "--max-new-tokens", "1", *flags]) == 5, "another tokenizer: it was let in"
    capsys.readouterr()
    monkeypatch.delenv("OUTRIDER_EDGE_TOKEN")
    with pytest.raises(SystemExit):
        main(["run", "x", "--token", token, *flags])
    said = capsys.readouterr().err
    assert "--token-file" in said and token not in said
    assert main(["run", "x", "--token-file", token, *flags]) == 2
    said = capsys.readouterr().err
    assert "wants a file, not the token" in said and token not in said
