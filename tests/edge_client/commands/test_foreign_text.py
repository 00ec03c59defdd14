"""What a client, a verifier or a file chooses reaches a terminal as text alone."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from outrider.edge_client.commands import ps
from outrider.edge_client.commands.cli import main

FOREIGN = "\x1b[2J\x1b]0;title\x07eve\r\nsecond\u202e"


def test_ps_prints_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = {"id": "cmpl-1" + FOREIGN, "state": "running", "mode": FOREIGN, "age_s": 1.0, "user": FOREIGN}
    counts = {"running": 2, "max_running": "8" + FOREIGN, "waiting": 0}
    found = {"data": [session, session | {"user": "bob"}], **counts}
    monkeypatch.setattr(ps, "ask_daemon", lambda *_: found)
    assert main(["ps", "--listen", "127.0.0.1:1"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 5 and all(map(str.isprintable, lines)), lines
    assert "eve  second" in lines[1] and lines[2].endswith("bob")


@pytest.mark.parametrize("found", [{}, [], {"data": [{}]}, {"data": ["x"]}, {"data": 1, "running": 2}])
def test_ps_says_that_something_else_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: object
) -> None:
    monkeypatch.setattr(ps, "ask_daemon", lambda *_: found)
    assert main(["ps", "--listen", "127.0.0.1:1"]) == 3
    assert "127.0.0.1:1 is no edge-client daemon" in capsys.readouterr().err


def test_ps_says_that_what_answers_speaks_no_http(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\x00\x12\x04 no HTTP\r\n")  # a gRPC server's first frame, say

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["ps", "--listen", listen]) == 3
        thread.join(10)
    error = capsys.readouterr().err
    assert f"no daemon answers at {listen}" in error and "Traceback" not in error


def test_an_error_that_quotes_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text('"no_such_\\e[2Jkey\\n": 1\n')
    assert main(["run", "--config", str(path), "hello"]) == 2
    error = capsys.readouterr().err
    assert error.removesuffix("\n").isprintable() and "no_such_" in error
