"""What the conversation's reader makes of lines that come through a pipe."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.common.errors import LinkError, UsageError
from outrider.edge_client.ui import repl
from outrider.edge_client.ui.conversation import Conversation
from outrider.edge_client.ui.repl import Repl


def answered(words: str, monkeypatch: pytest.MonkeyPatch, conversation: Any = None) -> tuple[list[str], str]:
    """The messages that are answered, and what is printed beside."""
    messages, out = list[str](), io.StringIO()
    monkeypatch.setattr(repl.Repl, "_answer", lambda self, message: messages.append(message))
    Repl(
        cast(Conversation, conversation or SimpleNamespace(has_template=True)), io.StringIO(words), out
    ).run()
    return messages, out.getvalue()


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("one\\\ntwo\nthree\n", ["one\ntwo", "three"]),
        ("one\ntwo\\", ["one", "two"]),
        ("one\\\n", ["one"]),
        ('"""one\ntwo"""\nthree', ["one\ntwo", "three"]),
        ('one\n"""two\nthree\n', ["one", "two\nthree"]),
    ],
)
def test_a_message_that_the_end_of_the_input_cuts_is_sent_as_it_is(
    words: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answered(words, monkeypatch)[0] == messages


def test_system_without_a_text_says_what_it_is_and_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Known:
        has_template, system = True, "be brief"

        def set_system(self, text: str) -> None:
            self.system = text

    known = Known()
    assert answered("/system\n", monkeypatch, known)[1] == "be brief\n" and known.system == "be brief"
    printed = answered('/system be kind\n/system ""\n/system\n', monkeypatch, known)[1].splitlines()
    assert [line.split()[-3:] for line in printed[:2]] == [
        ["this", "system", "message"],
        ["a", "system", "message"],
    ]
    assert known.system == "" and printed[2].startswith("there is no system message")


def test_lines_of_a_pipe_are_all_answered_and_the_status_is_that_of_the_first_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {"two": LinkError("no verifier"), "three": UsageError("no such mode")}
    answered = list[str]()

    def answer(_: Repl, message: str) -> None:
        answered.append(message)
        if message in failures:
            raise failures[message]

    monkeypatch.setattr(repl.Repl, "_answer", answer)
    conversation = cast(Conversation, SimpleNamespace(has_template=True))

    def status(words: str) -> int:
        return Repl(conversation, io.StringIO(words), io.StringIO()).run()

    assert status("one\nfour\n") == 0
    assert status("one\ntwo\nthree\nfour\n") == LinkError.exit_code != UsageError.exit_code
    assert status("/nothing\n") == UsageError.exit_code
    assert answered == ["one", "four", "one", "two", "three", "four"]
    assert "no verifier" in capsys.readouterr().err
