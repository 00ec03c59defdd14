"""Finds named entities by their spelling: capitalised words inside a sentence, acronyms, words like iPhone.

This replaces a recogniser (`--gate-ner` takes a real one). It misses one-word names at the start of a
sentence or a line, names in lower case, and scripts without upper case (Chinese, Arabic, Hindi). It wrongly
finds German nouns, titles in capitals, quoted sentences, and classes and constants of programs (`None`,
`ValueError`). Each of these costs one call to the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outrider.edge_client.gate.words import Span

_WORD = re.compile(r"[^\W\d_](?:[\w\u0300-\u036F]|['’-](?=\w))*")  # accents may be characters of their own
_NO_NAMES = frozenset({"I", "I'm", "I've", "I'd", "I'll", "I’m", "I’ve", "I’d", "I’ll", "OK", "Ok"})
# What stands before the first word of a line or of a sentence; not "J. " or "Dr. ", after which names come.
_BEGINS = re.compile(r"(?:^|\n)[\s>#*/|\"'“‘(\[{-]*$|[.!?…:;][\"'”’)\]}*_]*\s+[\"'“‘(\[*_]*$")
_TITLE = re.compile(r"\b(?:[^\W\d_]|Mr|Mrs|Ms|Dr|Prof|Rev|St|Sen|Gov|Gen|Capt|Sgt|Lt|Col|Mt|vs)\.\s+$")
_LOOK_BACK = 48  # characters before a word that say whether it begins a sentence


def find_names(text: str, start: int) -> Iterator[Span]:
    """Yields the spans of names that end after `start`."""
    for match in _WORD.finditer(text):
        before = text[max(0, match.start() - _LOOK_BACK) : match.start()]
        if match.end() > start and _is_name(match[0], before):
            yield match.span()


def _is_name(word: str, before: str) -> bool:
    if word in _NO_NAMES:
        return False
    if any(letter.isupper() for letter in word[1:]):  # NASA, McDonald, iPhone
        return True
    if len(word) == 1 or not word[0].isupper():
        return False  # a single letter may yet become a word, and is judged then
    return _TITLE.search(before) is not None or _BEGINS.search(before) is None
