"""Files of tokens and certificates that cannot be loaded for a moment: they are tried again until they can."""

from __future__ import annotations

import errno
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.authenticator import AccessError
from outrider.cloud_verifier.security.certificates import ServerCertificates, TlsPaths
from outrider.cloud_verifier.security.dev_certs import make_dev_certificates
from outrider.cloud_verifier.security.files import FileWatch
from outrider.cloud_verifier.security.server_security import ServerSecurity
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.security.tokens import TokenRecord, new_token
from outrider.common.errors import ConfigError

READ_TOKENS = "outrider.cloud_verifier.security.server_security.read_tokens"
CERTIFICATES = "outrider.cloud_verifier.security.certificates"
FAILED = "cannot take up the new"


def no_descriptor(*_: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def revoked(records: tuple[TokenRecord, ...]) -> list[TokenRecord]:
    return [replace(record, revoked=datetime.now(UTC)) for record in records]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def token(tokens: Path) -> str:
    text, record = new_token("acme", datetime.now(UTC), None)
    change_tokens(tokens, lambda _: [record])
    return text


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in (record.getMessage() for record in caplog.records) if FAILED in line]


def test_a_token_whose_revocation_could_not_be_read_is_refused_once_it_can(
    tokens: Path, token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    security = ServerSecurity(ServeConfig(tokens=tokens))
    assert security.authenticator is not None
    change_tokens(tokens, revoked)
    with monkeypatch.context() as patched:
        patched.setattr(READ_TOKENS, no_descriptor)
        for _ in range(3):
            assert security.reload() == frozenset()
        assert security.authenticator.identify([f"Bearer {token}"]).tenant == "acme"
    assert len(failures(caplog)) == 1, "it is tried each second, and not said each second"
    assert security.reload() == {token.split("_")[1]}, "its streams end"
    with pytest.raises(AccessError, match="is revoked"):
        security.authenticator.identify([f"Bearer {token}"])
    monkeypatch.setattr(READ_TOKENS, no_descriptor)
    assert security.reload() == frozenset() and len(failures(caplog)) == 1, (
        "what was loaded is not read again"
    )


def test_a_reload_that_was_asked_for_says_each_time_why_it_failed(
    tokens: Path, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    security = ServerSecurity(ServeConfig(tokens=tokens))
    tokens.write_text("{")
    for _ in range(2):
        security.reload()
        security.reload(is_forced=True)
    assert len(failures(caplog)) == 3 and "not JSON" in failures(caplog)[0]


def test_tokens_are_loaded_whatever_is_wrong_with_the_certificates(
    tmp_path: Path,
    tokens: Path,
    token: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    certificate, key = make_dev_certificates(tmp_path).server
    security = ServerSecurity(ServeConfig(tokens=tokens, tls_cert=certificate, tls_key=key))
    change_tokens(tokens, revoked)

    def raises(is_forced: bool) -> bool:
        raise ValueError("of a kind that nobody thought of")

    monkeypatch.setattr(security.certificates, "reload", raises)
    assert security.reload() == {token.split("_")[1]}
    assert ["that nobody thought of" in line for line in failures(caplog)] == [True]


def test_a_certificate_that_could_not_be_read_is_taken_up_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_dev_certificates(tmp_path)
    certificates = ServerCertificates(TlsPaths(*made.server))
    before = certificates.expires
    make_dev_certificates(tmp_path, clock=lambda: datetime.now(UTC) - timedelta(days=1))
    with monkeypatch.context() as patched:
        patched.setattr(f"{CERTIFICATES}.read_file", no_descriptor)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                certificates.reload()
    assert certificates.reload() and certificates.expires < before
    assert not certificates.reload()


def test_a_certificate_that_could_not_be_read_when_it_became_valid_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    made = make_dev_certificates(tmp_path)
    certificates = ServerCertificates(TlsPaths(*made.server), clock=lambda: now)
    before = certificates.expires
    make_dev_certificates(tmp_path, clock=lambda: now + timedelta(days=2))
    with pytest.raises(ConfigError, match="is valid from"):
        certificates.reload()
    assert not certificates.reload(), "until then there is nothing to try"
    now += timedelta(days=3)
    for step in ("read_file", "_check_pair"):
        with monkeypatch.context() as patched:
            patched.setattr(f"{CERTIFICATES}.{step}", no_descriptor)
            with pytest.raises(OSError, match="Too many open files"):
                certificates.reload()
    assert certificates.reload() and certificates.expires > before
    assert not certificates.reload()


def test_what_changes_while_files_are_loaded_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    watch = FileWatch([path])
    assert not watch.has_changed()
    path.write_text("22")
    assert watch.has_changed() and watch.has_changed(), "until it is accepted"
    path.write_text("333")
    watch.accept()
    assert watch.has_changed()
    watch.accept()
    assert not watch.has_changed()
