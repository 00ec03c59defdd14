"""Bearer tokens: their file, what passes for one and what does not, and the commands around them."""

from __future__ import annotations

import json
import os
import random
import stat
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outrider.cloud_verifier.security.authenticator import AccessError, Authenticator
from outrider.cloud_verifier.security.token_file import change_tokens, read_tokens
from outrider.cloud_verifier.security.tokens import TOKEN_PATTERN, TokenRecord, new_token, parse_lifetime
from outrider.cloud_verifier.server.cli import main
from outrider.common.errors import ConfigError, UsageError
from tests.cloud_verifier.security.bad_tokens import malformed

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = timedelta(days=1)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def reason_of(authenticator: Authenticator, *authorizations: str | bytes) -> str:
    with pytest.raises(AccessError) as raised:
        authenticator.identify(authorizations)
    for each in authorizations:
        secret = str(each)[-43:]
        assert len(secret) < 8 or secret not in str(raised.value), "the error quotes what was sent"
    return raised.value.reason


# ------------------------------------------------------------------------------------- one token


def test_a_token_says_whose_the_call_is() -> None:
    text, record = new_token("acme", NOW, DAY)
    caller = Authenticator([record], Clock()).identify([f"Bearer {text}"])
    assert (caller.tenant, caller.token_id, caller.is_admin) == ("acme", record.id, False)
    assert Authenticator([record], Clock()).identify([f"bearer {text}"]) == caller, "RFC 9110: any case"


def test_what_is_kept_does_not_hold_the_secret() -> None:
    text, record = new_token("acme", NOW, DAY)
    assert len(text) == 65 and text not in repr(record) and text[-43:] not in repr(record)
    assert len({new_token("acme", NOW, DAY)[0] for _ in range(100)}) == 100


def test_expired_and_revoked_tokens_are_told_apart_to_their_holder_only() -> None:
    clock = Clock()
    text, record = new_token("acme", NOW, DAY)
    authenticator = Authenticator([record], clock)
    clock.now = NOW + DAY - timedelta(microseconds=1)
    assert authenticator.identify([f"Bearer {text}"]).tenant == "acme"
    clock.now = NOW + DAY
    assert reason_of(authenticator, f"Bearer {text}") == "expired"
    other = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert reason_of(authenticator, f"Bearer {other}") == "unknown", "who has not the secret learns nothing"
    authenticator.replace([replace(record, revoked=NOW)])
    assert reason_of(authenticator, f"Bearer {text}") == "revoked"
    authenticator.replace([])
    assert reason_of(authenticator, f"Bearer {text}") == "unknown"


def test_every_truncation_and_every_changed_character_is_refused() -> None:
    text, record = new_token("acme", NOW, DAY)
    authenticator = Authenticator([record], Clock())
    for end in range(len(text)):
        assert reason_of(authenticator, f"Bearer {text[:end]}") == "malformed"
        swapped = text[:end] + ("x" if text[end] != "x" else "y") + text[end + 1 :]
        assert reason_of(authenticator, f"Bearer {swapped}") in ("malformed", "unknown")
    for longer in (text + "A", " " + text, text + " ", text + "\n", text + "\0", text + "=", text * 2):
        assert reason_of(authenticator, f"Bearer {longer}") == "malformed"


def test_ten_thousand_malformed_tokens_are_all_refused() -> None:
    text, record = new_token("acme", NOW, DAY)
    authenticator, rng = Authenticator([record], Clock()), random.Random(8)
    reasons: dict[str, int] = {}
    for _ in range(10_000):
        sent = malformed(rng, text)
        try:
            caller = authenticator.identify([sent])
        except AccessError as error:
            reasons[error.reason] = reasons.get(error.reason, 0) + 1
        else:
            raise AssertionError(f"{sent!r} was taken for {caller}")
    assert sum(reasons.values()) == 10_000 and set(reasons) == {"malformed", "unknown"}, reasons
    assert authenticator.identify([f"Bearer {text}"]).tenant == "acme", "the right one still passes"


def test_no_token_and_two_tokens_are_refused() -> None:
    text, record = new_token("acme", NOW, DAY)
    authenticator = Authenticator([record], Clock())
    assert reason_of(authenticator) == "missing"
    assert reason_of(authenticator, f"Bearer {text}", f"Bearer {text}") == "malformed"


def test_the_digest_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []
    name = "outrider.cloud_verifier.security.authenticator.hmac.compare_digest"
    monkeypatch.setattr(name, lambda a, b: compared.append((a, b)) or a == b)
    text, record = new_token("acme", NOW, DAY)
    authenticator = Authenticator([record], Clock())
    authenticator.identify([f"Bearer {text}"])
    reason_of(authenticator, f"Bearer outrider_{'0' * 12}_{'A' * 43}")
    assert len(compared) == 2, "an unknown id costs the same comparison"


def test_what_ended_since_the_last_look_is_named_once() -> None:
    clock = Clock()
    records = [new_token("acme", NOW, days * DAY)[1] for days in (1, 2)] + [new_token("acme", NOW, None)[1]]
    authenticator = Authenticator(records, clock)
    assert authenticator.take_ended() == frozenset()
    clock.now = NOW + DAY
    assert authenticator.take_ended() == {records[0].id} and not authenticator.take_ended()
    authenticator.replace([records[0], records[1], replace(records[2], revoked=NOW)])
    assert authenticator.take_ended() == {records[2].id}
    authenticator.replace([])
    assert authenticator.take_ended() == {records[1].id}, "a record that is gone ends too"


# -------------------------------------------------------------------------------------- the file


def write(path: Path, *records: TokenRecord) -> Path:
    change_tokens(path, lambda _: records)
    return path


def test_the_file_keeps_every_field_and_is_the_owners_alone(tmp_path: Path) -> None:
    records = (
        new_token("a", NOW, DAY)[1],
        replace(new_token("b", NOW, None)[1], revoked=NOW + DAY),
        new_token("c", NOW, DAY, is_admin=True)[1],
    )
    path = write(tmp_path / "tokens.json", *records)
    assert read_tokens(path) == records
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    change_tokens(path, lambda old: old[1:])
    assert read_tokens(path) == records[1:] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_changes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    records = [new_token("a", NOW, DAY)[1] for _ in range(16)]

    def add(record: TokenRecord) -> None:
        change_tokens(path, lambda old: (*old, record))

    threads = [threading.Thread(target=add, args=(record,)) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_tokens(path)) == set(records)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_writes_stays_readable_to_the_service_that_reads_it(tmp_path: Path) -> None:
    service = 12_345
    os.chown(tmp_path, service, service)
    path = write(tmp_path / "tokens.json", new_token("a", NOW, DAY)[1])
    assert (path.stat().st_uid, path.stat().st_gid) == (service, service), "as the directory"
    os.chown(path, service + 1, service)
    write(path)
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (service + 1, 0o600), "as it was"


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.json", new_token("a", NOW, DAY)[1])
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=r"others may write it \(mode 0620\): chmod 600"):
        read_tokens(path)


def test_a_file_that_all_may_read_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "tokens.json", new_token("a", NOW, DAY)[1])
    read_tokens(path)
    assert not caplog.records
    path.chmod(0o644)
    read_tokens(path)
    assert "chmod 600" in caplog.text


def entry(**fields: object) -> dict[str, object]:
    record = new_token("a", NOW, DAY)[1]
    times = {"created": NOW.isoformat(), "expires": None, "revoked": None}
    return {"id": record.id, "tenant": "a", "sha256": record.digest, "admin": False, **times} | fields


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "is not a file of tokens"),
        ('{"schema": 2, "tokens": []}', "has schema 2"),
        ({"schema": 1}, "'tokens'"),
        ({"schema": 1, "tokens": [{}]}, "'id'"),
        ({"schema": 1, "tokens": [entry(sha256="abc")]}, "is not a file of tokens"),
        ({"schema": 1, "tokens": [entry(sha256="")]}, "sha256 has another length"),
        ({"schema": 1, "tokens": [entry(tenant="a b")]}, "tenant is malformed"),
        ({"schema": 1, "tokens": [entry(expires="2026-11-21T00:00:00")]}, "a time without its zone"),
        ({"schema": 1, "tokens": [entry(expires="soon")]}, "Invalid isoformat"),
        ({"schema": 1, "tokens": [entry(id="1" * 12), entry(id="1" * 12)]}, "two tokens have one id"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"--tokens {path}: .*{words}"):
        read_tokens(path)


def test_only_true_makes_an_admin_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"schema": 1, "tokens": [entry(admin="yes")]}))
    path.chmod(0o600)
    assert not read_tokens(path)[0].is_admin


# ----------------------------------------------------------------------------------- the commands


def test_new_list_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.json"
    assert main(["token", "new", "--tenant", "acme", "--tokens", str(path)]) == 0
    shown = capsys.readouterr()
    text = shown.out.strip()
    assert TOKEN_PATTERN.fullmatch(text) and text not in shown.err, "on stdout alone, for a pipe"
    token_id = text.split("_")[1]
    assert Authenticator(read_tokens(path)).identify([f"Bearer {text}"]).tenant == "acme"
    assert read_tokens(path)[0].expires == read_tokens(path)[0].created + 90 * DAY

    out = tmp_path / "edge.token"
    more = ["--expires", "never", "--admin", "--out", str(out), "--tokens", str(path)]
    assert main(["token", "new", "--tenant", "ops", *more]) == 0
    assert capsys.readouterr().out == "" and stat.S_IMODE(out.stat().st_mode) == 0o600
    assert Authenticator(read_tokens(path)).identify([f"Bearer {out.read_text().strip()}"]).is_admin

    assert main(["token", "revoke", token_id, "--tokens", str(path)]) == 0
    assert reason_of(Authenticator(read_tokens(path)), f"Bearer {text}") == "revoked"
    assert main(["token", "list", "--tokens", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "tenant", "for", "created", "expires", "state"]
    assert lines[1].split()[0] == token_id and lines[1].endswith("revoked")
    assert "admin port" in lines[2] and "never" in lines[2] and lines[2].endswith("valid")
    assert text[-43:] not in "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "--tenant", "a b", "--tokens", "F"], "--tenant a b: must be 1 to 64"),
        (["new", "--tenant", "a", "--expires", "soon", "--tokens", "F"], "--expires soon: want a number"),
        (["new", "--tenant", "a", "--expires", "0d", "--tokens", "F"], "--expires 0d"),
        (["new", "--tenant", "a", "--expires", "999999w", "--tokens", "F"], "is too long; say never"),
        (["new", "--tenant", "a"], "Name it with --tokens FILE"),
        (["new", "--tenant", "a", "--tokens", "nowhere/F"], "nowhere/F: cannot write it"),
        (["list", "--tokens", "F"], "there is no such file; make one with: cloud-verifier token new"),
        (["revoke", "1", "--tokens", "F"], "there is no such file"),
    ],
)
def test_what_is_used_wrongly_says_how_to_use_it(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["token", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("F")), "nothing was made"


def test_the_file_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER_TOKENS", str(tmp_path / "t.json"))
    assert main(["token", "new", "--tenant", "a"]) == 0
    assert len(read_tokens(tmp_path / "t.json")) == 1
    assert main(["token", "revoke", "0" * 12]) == 2
    assert f"has no token {'0' * 12}" in capsys.readouterr().err


def test_lifetimes_are_read_as_people_write_them() -> None:
    assert parse_lifetime("90d") == 90 * DAY and parse_lifetime("12h") == DAY / 2
    assert parse_lifetime("never") is None
    with pytest.raises(UsageError):
        parse_lifetime("1y")
