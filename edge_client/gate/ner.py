"""Finds named entities with a spaCy pipeline that the user has installed: `--gate-ner NAME_OR_DIR`, extra
`ner`.

It reads context and block again after each drafted token, which takes milliseconds with a real pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.edge_client.gate.words import Span

_NAMERS = frozenset({"ner", "beam_ner", "entity_ruler", "span_ruler"})
# Numbers and dates are the other rules' business.
_NUMERIC = frozenset({"CARDINAL", "ORDINAL", "QUANTITY", "PERCENT", "MONEY", "DATE", "TIME"})


class NamedEntities:
    """Loads the pipeline. Raises `UsageError` where spaCy or the pipeline is missing, or the pipeline names
    no entities."""

    def __init__(self, name: str) -> None:
        with needs_extra("ner", f"--gate-ner {name}"):
            import spacy
        try:
            self._pipeline: Any = spacy.load(name)
        except (OSError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            raise UsageError(f"--gate-ner {name}: spaCy cannot load it: {first_line}") from error
        parts = self._pipeline.pipe_names
        if not _NAMERS.intersection(parts):
            has = ", ".join(parts) or "nothing"
            raise UsageError(f"--gate-ner {name} has {has}, and needs ner or entity_ruler to name entities")

    def find(self, text: str, start: int) -> Iterator[Span]:
        """Yields the spans of named entities; numbers and dates are left to other rules."""
        for entity in self._pipeline(text).ents:
            if entity.label_ not in _NUMERIC:
                yield entity.start_char, entity.end_char
