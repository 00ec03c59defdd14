"""Configures what a text must obey: a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.config.loader import option
from outrider.common.errors import UsageError
from outrider.common.types import Grammar, GrammarKind

KEYS = {GrammarKind.JSON_SCHEMA: "json_schema", GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Holds texts, not files: a request to the daemon may choose them, and reads no file here."""

    json_schema: str = option("", "JSON schema that the text obeys", is_flag=False)
    regex: str = option("", "regular expression that the whole text matches", metavar="PATTERN")
    grammar: str = option("", "Lark grammar, in llguidance's dialect, that the text obeys", is_flag=False)
    json_whitespace: bool = option(False, "with a JSON schema: allow any whitespace between tokens, not none")


def make_grammar(config: GrammarConfig) -> Grammar | None:
    """Returns the grammar that was chosen, not compiled, or None. Raises `UsageError` for more than one."""
    chosen = {kind: text for kind, key in KEYS.items() if (text := getattr(config, key))}
    if len(chosen) > 1:
        flags = " and ".join(f"--{KEYS[kind].replace('_', '-')}" for kind in chosen)
        raise UsageError(f"{flags} do not go together: give one of them")
    for kind, text in chosen.items():
        return Grammar(kind, text, config.json_whitespace and kind is GrammarKind.JSON_SCHEMA)
    return None
