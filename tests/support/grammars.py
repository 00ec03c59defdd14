"""Grammars over the embedded pair's tokenizer; tests that import this are skipped without llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind
from outrider.models import EMBEDDED

pytest.importorskip("llguidance", reason="llguidance is not installed (extra structured)")

EOS = 0
NUM_TOKENS = 8192
TOKENIZER = Path(EMBEDDED) / "target" / "tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Known(Vocabulary):
    """A vocabulary that tells the text of its ids."""

    def text(self, token_id: int) -> str:
        return str(self._tokenizer.decode_str([token_id]))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenize_str(text))


@functools.cache
def vocabulary() -> Known:
    opened = Vocabulary.open(TOKENIZER, NUM_TOKENS, (EOS,))
    return Known(opened._tokenizer, opened.eos_token_ids)


@functools.cache
def compiled(grammar: Grammar) -> Grammar:
    return vocabulary().compile(grammar)


def encode(text: str) -> list[int]:
    return vocabulary().encode(text)


def schema(content: Mapping[str, object]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)
