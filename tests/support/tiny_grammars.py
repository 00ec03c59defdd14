"""Grammars over the 32 tokens of `FakeBackend`, and their compilation without threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.common.grammar.state import GrammarState, Words
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind, TokenIds

TEXTS = ["", *"abcdefghij", *"0123456789", *'{}":,[]', "ab", "12", '":', "cd"]  # of the ids; 0 ends a text


@functools.cache
def tiny_vocabulary() -> Vocabulary:
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed (extra structured)")

    class Tokenizer:
        eos_token_id, bos_token_id = 0, None
        tokens = tuple(text.encode() or b"<end>" for text in TEXTS)
        special_token_ids = (0,)

        def __call__(self, text: str | bytes) -> list[int]:
            raw = text if isinstance(text, bytes) else text.encode()
            return [self.tokens.index(bytes([each])) for each in raw]

    wrapped = llguidance.TokenizerWrapper(Tokenizer())
    return Vocabulary(llguidance.LLTokenizer(wrapped, n_vocab=len(TEXTS)), (0,))


@functools.cache
def tiny(text: str, kind: GrammarKind = GrammarKind.REGEX) -> Grammar:
    """Returns a compiled grammar."""
    return tiny_vocabulary().compile(Grammar(kind, text))


def text_of(token_ids: Any) -> str:
    return "".join(TEXTS[each] for each in token_ids)


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **named))
        return done


class Later(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        self.waiting.append(lambda: function(*args, **named))
        return Future()

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def tiny_store(pool: Executor | None = None) -> GrammarStore:
    return GrammarStore(tiny_vocabulary(), pool or AtOnce())


def cost_by_path(monkeypatch: pytest.MonkeyPatch, cost_s: Callable[[TokenIds], float]) -> list[TokenIds]:
    """Has each mask take a time by the tokens after the output that it is of; returns a list of these, as they are
    asked for."""
    asked, now_s, find = list[TokenIds](), 0.0, GrammarState._allowed

    def slow(self: GrammarState, path: TokenIds) -> Words:
        nonlocal now_s
        asked.append(path)
        now_s += cost_s(path)
        return find(self, path)

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    monkeypatch.setattr(GrammarState, "_allowed", slow)
    return asked
