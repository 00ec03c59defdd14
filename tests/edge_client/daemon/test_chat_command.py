"""`edge-client chat` on a terminal of its own, and fed by a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.commands.cli import main
from outrider.edge_client.ui.repl import Repl
from outrider.experiments.shared.processes import run_edge

# So that Ctrl-C typed there is a signal, which is ignored in what a shell started in the background. Not in a
# `preexec_fn`: threads of gRPC run in this process.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        """What was shown up to `pattern`, and it; the next call begins behind."""
        end_s = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.seen)):
            left_s = end_s - time.monotonic()
            assert left_s > 0 and select.select([self._descriptor], [], [], left_s)[0], self.seen
            try:
                self.seen += os.read(self._descriptor, 65536).decode(errors="replace")
            except OSError as error:  # the program is gone
                raise AssertionError(self.seen) from error
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def press_until_shown(self, key: str, pattern: str) -> None:
        """Again where it does not show, or only the key's echo: CPython sees a signal that comes between two
        of readline's waits with the next key only."""
        for _ in range(20):
            self.type(key)
            with suppress(AssertionError):
                self.wait_for(pattern, timeout_s=3.0)
                return
        raise AssertionError(f"{pattern} was not shown: {self.seen}")


@contextmanager
def chatting(verifier: VerifierServer, *flags: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-c",
        _TAKE_TERMINAL,
        sys.executable,
        "-m",
        "outrider.edge_client",
        "chat",
        *flags,
    ]
    command += ["--verifier", f"127.0.0.1:{verifier.port}"]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_ctrl_c_stops_an_answer_and_not_the_program(verifier: VerifierServer, template_file: Path) -> None:
    flags = ("--chat-template", str(template_file), "--ignore-eos", "--max-new-tokens", "4000")
    with chatting(verifier, *flags) as (terminal, process):
        terminal.wait_for("> ")
        terminal.type('"""first line\nsecond line"""\n')
        terminal.wait_for(r'line"""\r\n(?s:.{80})')
        terminal.type("\x03")
        terminal.wait_for(r"· stopped by you\]")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.press_until_shown("\x03", r"/quit or Ctrl-D leaves")
        terminal.type("/mode edge-only\n")
        terminal.wait_for("mode edge-only;")
        terminal.type("/stats\n")
        terminal.wait_for(r"stretches +[a-z-]+ \d+")
        terminal.type("/reset\n")
        terminal.wait_for("forgotten")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert process.wait(60) == 0
    assert verifier.engine.num_sessions == 0


def test_without_a_template_it_says_what_it_does(
    verifier: VerifierServer, draft_without_template: Path
) -> None:
    flags = ("--draft", str(draft_without_template), "--max-new-tokens", "4")
    with chatting(verifier, *flags) as (terminal, process):
        terminal.wait_for("no chat template")
        terminal.wait_for("> ")
        terminal.type("/system be brief\n")
        terminal.wait_for("needs a chat template")
        terminal.type("/quit\n")
        assert process.wait(60) == 0


def test_with_a_template_an_answer_has_no_limit_of_tokens_unless_one_is_given(
    template_file: Path, draft_without_template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []

    def run(repl: Repl) -> int:
        limits.append(repl._conversation.config.max_new_tokens)
        return 0

    monkeypatch.setattr(Repl, "run", run)
    has_template, has_none = ("--chat-template", str(template_file)), ("--draft", str(draft_without_template))
    for flags in (has_template, (*has_template, "--max-new-tokens", "300"), has_none):
        assert main(["chat", *flags]) == 0
    assert limits == [None, 300, 256]


def test_what_was_typed_comes_back_with_the_arrow_key_the_next_time(
    verifier: VerifierServer, tmp_path: Path
) -> None:
    history = tmp_path / "typed"
    for keys in ("/mode cloud-only\n", "\x1b[A\x1b[A\n"):
        with chatting(verifier, "--history", str(history)) as (terminal, process):
            terminal.wait_for("> ")
            terminal.type(keys)
            terminal.wait_for("mode cloud-only;")
            terminal.type("/quit\n")
            assert process.wait(60) == 0
    assert history.read_text().splitlines()[0] == "/mode cloud-only"
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_pipe_gets_the_answers_and_a_conversation_has_memory(
    verifier: VerifierServer, draft_without_template: Path
) -> None:
    flags = ("--verifier", f"127.0.0.1:{verifier.port}", "--draft", str(draft_without_template))
    flags += ("--seed", "3", "--max-new-tokens", "8")
    flags += ("--on-timeout", "wait")  # another text, where a busy machine lets a round time out
    words = "def add(a, b):\ndef sub(a, b):\n"
    done = run_edge(["chat", *flags], prompt=words)
    assert done.returncode == 0 and "> " not in done.stdout, done.stderr
    first = run_edge(["run", *flags, "def add(a, b):"]).stdout
    assert done.stdout.startswith(first)
    again = run_edge(["run", *flags, f"def add(a, b):{first}".rstrip("\n") + "\ndef sub(a, b):"]).stdout
    assert done.stdout == first + again


def test_completion_scripts_know_verbs_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("doctor", "--max-new-tokens", "--write-timeout-s", "completion")
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in words)
        assert "first_token" in printed, "choices of a flag"


def test_run_needs_nothing_of_the_daemons() -> None:
    heavy = "{'starlette', 'uvicorn', 'jinja2', 'prometheus_client', 'shtab'}"
    modules = "outrider.edge_client.commands.cli, outrider.edge_client.commands.run"
    code = f"import sys, {modules}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
