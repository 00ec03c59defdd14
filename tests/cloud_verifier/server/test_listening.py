"""What a verifier opens to others: nothing beyond loopback without encryption and credentials."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.calls import eventually
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.dev_certs import DevCertificates, make_dev_certificates
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.security.tokens import new_token
from outrider.cloud_verifier.server.addresses import check_addresses
from outrider.cloud_verifier.server.cli import main
from outrider.cloud_verifier.server.entrance import server_options
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common import codec
from outrider.common.config.fields import leaves
from outrider.common.config.loader import with_values
from outrider.common.errors import UsageError
from outrider.common.types import Draining

BEYOND = ["0.0.0.0:7077", "[::]:7077", "10.0.0.1:7077", "verifier.example:7077", "[fe80::1]:1"]
LOOPBACK = ["127.0.0.1:7077", "127.1.2.3:7077", "localhost:7077", "[::1]:7077"]
FILE = Path("some-file")
TLS = {"tls_cert": FILE, "tls_key": FILE}


@pytest.mark.parametrize("listen", BEYOND)
def test_beyond_loopback_both_encryption_and_credentials_are_wanted(listen: str) -> None:
    def refusal(**settings: object) -> str:
        with pytest.raises(UsageError) as raised:
            check_addresses(ServeConfig(listen=listen, admin_listen="none", **settings))  # type: ignore[arg-type]
        assert "--insecure" in str(raised.value) and f"--listen {listen}: " in str(raised.value)
        return str(raised.value)

    nothing = refusal()
    assert "encryption (--tls-cert and --tls-key)" in nothing and "credentials (--tokens, or" in nothing
    assert "credentials" not in refusal(tokens=FILE) and "encryption" not in refusal(**TLS)
    for enough in (TLS | {"tokens": FILE}, TLS | {"tls_client_ca": FILE}, {"insecure": True}):
        config = ServeConfig(listen=listen, admin_listen="none", **enough)  # type: ignore[arg-type]
        assert check_addresses(config) == (listen, None)


@pytest.mark.parametrize("listen", LOOPBACK)
def test_loopback_wants_nothing(listen: str) -> None:
    assert check_addresses(ServeConfig(listen=listen, admin_listen=listen)) == (listen, listen)


def test_the_admin_port_beyond_loopback_wants_a_file_of_tokens() -> None:
    config = ServeConfig(admin_listen="0.0.0.0:7078")
    with pytest.raises(UsageError, match=r"--admin-listen .*encryption.*token new --admin.*--insecure"):
        check_addresses(config)
    with pytest.raises(UsageError, match=r"--admin-listen .*lacks a file of tokens"):
        check_addresses(replace(config, tls_cert=FILE, tls_key=FILE, tls_client_ca=FILE))
    secured = replace(config, tls_cert=FILE, tls_key=FILE, tokens=FILE)
    assert check_addresses(secured)[1] == check_addresses(replace(config, insecure=True))[1] == "0.0.0.0:7078"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_cert": FILE}, "--tls-cert some-file: needs its private key"),
        ({"tls_key": FILE}, "--tls-key some-file: needs its certificate"),
        ({"tls_client_ca": FILE}, "--tls-client-ca: client certificates need TLS"),
    ],
)
def test_flags_that_lack_another_are_named(settings: dict[str, Path], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_addresses(ServeConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], "lacks encryption"),
        (["--admin-listen", "0.0.0.0:0"], "lacks encryption"),
        (["--tokens", "nowhere"], "--tokens nowhere: there is no such file; make one with"),
        (["--tls-cert", "nowhere", "--tls-key", "nowhere"], "--tls-cert nowhere: cannot read it"),
        (
            ["--session-idle-ttl-s", "5000000"],
            "--session-idle-ttl-s): is '5000000'; expected a number, at least 0.1 and at most 4e+06",
        ),
        (["--drain-grace-s", "inf"], "--drain-grace-s): is 'inf'; expected a number, at least 0 and at most"),
        (
            ["--max-message-bytes", "3000000000"],
            "--max-message-bytes): is '3000000000'; expected an integer, at least 1024 and at most",
        ),
    ],
)
def test_the_command_refuses_before_it_loads_a_model(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", "--target", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err


def test_what_the_largest_values_allow_fits_the_wire() -> None:
    largest = {leaf.key: leaf.option.maximum for leaf in leaves(ServeConfig) if leaf.option.maximum}
    assert {"session_idle_ttl_s", "drain_grace_s", "max_sessions", "max_message_bytes"} <= largest.keys()
    config = with_values(ServeConfig(), **{key: int(value) for key, value in largest.items()})
    model = make_model_info(FakeBackend(), config, has_grammars=True)
    described = codec.decode_model_info(codec.encode_model_info(model))
    assert described.limits == model.limits
    codec.encode_response(Draining(int(config.drain_grace_s * 1000), "shutting down"), None)
    assert max(value for _, value in server_options(config.max_message_bytes)) < 2**31, "an int of gRPC's"


# ---------------------------------------------------------------------- the admin port beyond loopback


@dataclass
class Admin:
    server: VerifierServer
    context: ssl.SSLContext
    tokens: dict[str, str]

    def get(self, path: str, token: str = "", scheme: str = "https") -> tuple[int, str]:
        assert self.server.admin is not None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"{scheme}://localhost:{self.server.admin.port}{path}"
        try:
            request = urllib.request.Request(url, headers=headers)
            context = self.context if scheme == "https" else None
            with urllib.request.urlopen(request, context=context, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def certificates(tmp_path: Path) -> DevCertificates:
    return make_dev_certificates(tmp_path)


@pytest.fixture
def admin(tmp_path: Path, certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """On loopback, but believing that it is not."""
    monkeypatch.setattr("outrider.cloud_verifier.server.admin.is_loopback", lambda host: False)
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    path, now = tmp_path / "tokens.json", datetime.now(UTC)
    made = {name: new_token(name, now, None, is_admin=name == "admin") for name in ("admin", "acme")}
    change_tokens(path, lambda _: [record for _, record in made.values()])
    config = ServeConfig(tls_cert=certificates.server[0], tls_key=certificates.server[1], tokens=path)
    context = ssl.create_default_context(cafile=str(certificates.ca))
    with serving(FakeBackend(), config) as server:
        yield Admin(server, context, {name: text for name, (text, _) in made.items()})


def test_probes_answer_anybody_and_the_rest_wants_an_admin_token(admin: Admin) -> None:
    assert admin.server.admin is not None and admin.server.admin.url.startswith("https://")
    for path in ("/healthz", "/readyz"):
        assert admin.get(path) == (200, "ok\n")
    for path in ("/metrics", "/version", "/", "/nothing", "/healthz/../metrics", "/metrics?x"):
        assert admin.get(path) == (401, "the call has no token\n")
        assert admin.get(path, "nonsense")[0] == 401
        assert admin.get(path, admin.tokens["acme"])[0] == 403, "a tenant's token is none of an operator"
    status, metrics = admin.get("/metrics", admin.tokens["admin"])
    assert status == 200 and 'refused_calls_total{reason="denied"} 6.0' in metrics
    assert "outrider_verifier_certificate_expiry_timestamp_seconds" in metrics
    assert admin.get("/version", admin.tokens["admin"])[0] == 200
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        admin.get("/healthz", scheme="http")


def test_the_admin_port_takes_up_a_renewed_certificate(admin: Admin, certificates: DevCertificates) -> None:
    before = admin.server.security.certificates
    assert before is not None
    context = before.http_context
    make_dev_certificates(certificates.directory)
    assert eventually(lambda: before.http_context is not context)
    assert admin.get("/healthz") == (200, "ok\n")


def test_a_client_that_never_shakes_hands_keeps_nobody_waiting(admin: Admin) -> None:
    import socket

    assert admin.server.admin is not None
    with socket.create_connection(("127.0.0.1", admin.server.admin.port)):
        assert admin.get("/healthz") == (200, "ok\n")


# ---------------------------------------------------------------------------------------- cert dev


def test_cert_dev_writes_what_its_two_commands_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography import x509

    monkeypatch.chdir(tmp_path)
    assert main(["cert", "dev", "--host", "verifier.example", "10.0.0.5", "--tenant", "acme"]) == 0
    lines = capsys.readouterr().out.splitlines()
    serve, run = lines[1].split(), lines[2].split()
    assert serve[:2] == ["cloud-verifier", "serve"] and run[:2] == ["edge-client", "run"]
    assert "verifier.example:7077" in run
    files = [Path(word) for word in serve + run if word.startswith("outrider-dev-certs/")]
    assert len(files) == 6 and all(path.is_file() for path in files)
    directory = tmp_path / "outrider-dev-certs"
    assert directory.stat().st_mode & 0o777 == 0o700
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == (0o600 if path.suffix == ".key" else 0o644), path
    server = x509.load_pem_x509_certificate((directory / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "verifier.example"]
    addresses = [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "::1", "10.0.0.5"]
    assert 29 <= (server.not_valid_after_utc - datetime.now(UTC)).days <= 30
    client = x509.load_pem_x509_certificate((directory / "client.crt").read_bytes())
    assert client.subject.rfc4514_string() == "CN=acme"

    before = (directory / "ca.crt").read_bytes()
    assert main(["cert", "dev"]) == 0
    assert (directory / "ca.crt").read_bytes() == before, "edges need no change"
    said = capsys.readouterr().err
    assert "replaced server.crt, server.key, client.crt, client.key; the authority stays" in said
    (directory / "ca.key").unlink()
    assert main(["cert", "dev"]) == 0
    assert "the authority is new too" in capsys.readouterr().err


def test_cert_dev_writes_over_nobody_elses_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.crt").write_text("of somebody\n")
    assert main(["cert", "dev", "--dir", str(tmp_path)]) == 2
    assert "server.crt there was not made by `cert dev`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["server.crt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "a:7077"], "--host a:7077: want a name or an IP address"),
        (["--host", "a b"], "--host a b: want a name"),
        (["--tenant", "a/b"], "--tenant a/b: must be 1 to 64"),
        (["--dir", "/proc/nowhere"], "--dir /proc/nowhere: cannot write there"),
    ],
)
def test_cert_dev_used_wrongly_says_how(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cert", "dev", *arguments]) == 2
    assert words in capsys.readouterr().err
