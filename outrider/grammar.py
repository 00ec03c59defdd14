"""Grammars that a text obeys, for programs of their own: which ids may follow a text (docs/structured.md).

`Vocabulary.open` needs the extra `structured`.
"""

from __future__ import annotations

from outrider.common.grammar.masks import mask_scores
from outrider.common.grammar.state import GrammarLimitError, GrammarState, state_of
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind

__all__ = [
    "Grammar",
    "GrammarKind",
    "GrammarLimitError",
    "GrammarState",
    "Vocabulary",
    "mask_scores",
    "state_of",
]
