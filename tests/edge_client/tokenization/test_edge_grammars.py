"""An edge's compiled grammars: kept, and none of them waits for another one's compilation."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.common.errors import InvalidFieldError, UsageError
from outrider.common.types import Grammar, GrammarKind
from outrider.edge_client.session.grammars import EdgeGrammars


class SlowCompiler:
    """Compiles "slow" once it is told to, and refuses "bad"."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Grammar:
        self.compiled.append(grammar.text)
        if grammar.text == "slow":
            self.has_begun.set()
            assert self.may_end.wait(30)
        if grammar.text == "bad":
            raise InvalidFieldError("sampling.grammar", "regex: it is bad")
        return replace(grammar, compiled=object())

    def close(self) -> None: ...


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_a_known_grammar_waits_for_no_compilation_and_a_refusal_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, compiler = EdgeGrammars(Path("tokenizer.json"), 100, (0,)), SlowCompiler()
    monkeypatch.setattr(EdgeGrammars, "_open", lambda self: compiler)
    known = grammars.compile(regex("known"))
    for _ in range(2):
        with pytest.raises(UsageError, match="it is bad"):
            grammars.compile(regex("bad"))
    slow = threading.Thread(target=grammars.compile, args=(regex("slow"),))
    slow.start()
    assert compiler.has_begun.wait(30)
    assert grammars.compile(regex("known")) is known
    compiler.may_end.set()
    slow.join()
    assert compiler.compiled == ["known", "bad", "slow"]
