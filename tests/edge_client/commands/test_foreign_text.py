"""What a client, a verifier or a file chooses reaches a terminal as text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.edge_client.commands import ps
from outrider.edge_client.commands.cli import main

FOREIGN = "\x1b[2J\x1b]0;title\x07eve\r\nsecond\u202e"


def test_ps_prints_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = {"id": "cmpl-1" + FOREIGN, "state": "running", "mode": FOREIGN, "age_s": 1.0, "user": FOREIGN}
    found = {"data": [session, session | {"user": "bob"}], "running": 2, "max_running": 8, "waiting": 0}
    monkeypatch.setattr(ps, "ask_daemon", lambda *_: found)
    assert main(["ps", "--listen", "127.0.0.1:1"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 5 and all(map(str.isprintable, lines)), lines
    assert "eve  second" in lines[1] and lines[2].endswith("bob")


def test_an_error_that_quotes_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text('"no_such_\\e[2Jkey\\n": 1\n')
    assert main(["run", "--config", str(path), "hello"]) == 2
    error = capsys.readouterr().err
    assert error.removesuffix("\n").isprintable() and "no_such_" in error
