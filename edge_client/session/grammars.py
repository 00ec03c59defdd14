"""Compiles the grammars of an edge's sessions, and keeps them for the next ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from outrider.common.errors import InvalidFieldError, UsageError
from outrider.common.types import Grammar, TokenIds
from outrider.edge_client.config.grammar import KEYS

_MAX_KEPT = 32


class _Compiler(Protocol):
    def compile(self, grammar: Grammar) -> Grammar: ...

    def close(self) -> None: ...


class EdgeGrammars:
    """Compiles with the first use. Thread-safe. Where grammars are `checked`, as those of other programs are, each is
    compiled in another process first, which a hostile one cannot outlive."""

    def __init__(self, tokenizer_json: Path, num_tokens: int, eos_token_ids: TokenIds) -> None:
        """`eos_token_ids` are the draft's; a target with others has the last word."""
        self.is_checked = False
        self._where = tokenizer_json, num_tokens, eos_token_ids
        self._compiler: _Compiler | None = None
        self._kept: OrderedDict[Grammar, Grammar | InvalidFieldError] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept
        self._compiling = threading.Lock()  # not held for a known one, which waits for no compilation

    def compile(self, grammar: Grammar) -> Grammar:
        """Returns the grammar with its compiled form. Raises `UsageError` naming the flag and the place, and where
        llguidance is missing."""
        if (found := self._known(grammar)) is None:
            with self._compiling:
                if (found := self._known(grammar)) is None:
                    found = self._compile(grammar)
        if isinstance(found, InvalidFieldError):
            key = KEYS[grammar.kind]
            raise UsageError(f"{key} (--{key.replace('_', '-')}): {found.reason}") from found
        return found

    def _known(self, grammar: Grammar) -> Grammar | InvalidFieldError | None:
        with self._lock:
            if (found := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
            return found

    def _compile(self, grammar: Grammar) -> Grammar | InvalidFieldError:
        found: Grammar | InvalidFieldError
        self._compiler = self._compiler or self._open()
        try:
            found = self._compiler.compile(grammar)
        except InvalidFieldError as error:
            found = error
        with self._lock:
            self._kept[grammar] = found
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the other process, if there is one."""
        if self._compiler is not None:
            self._compiler.close()

    def _open(self) -> _Compiler:
        from outrider.common.grammar.checked import CheckedCompiler
        from outrider.common.grammar.vocabulary import Vocabulary

        return CheckedCompiler(*self._where) if self.is_checked else Vocabulary.open(*self._where)
