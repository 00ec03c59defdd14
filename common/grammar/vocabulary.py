"""What a tokenizer's ids stand for, as llguidance needs it, and the compilation of grammars over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.common.errors import InvalidFieldError, ModelError
from outrider.common.grammar.numbers import fit_schema, fit_schemas_in
from outrider.common.grammar.state import (
    UNBOUNDED,
    UNKNOWN_COST,
    CompiledGrammar,
    GrammarBounds,
    GrammarCost,
)
from outrider.common.models import fingerprint
from outrider.common.process.extras import needs_extra
from outrider.common.types import Grammar, GrammarKind, TokenIds

FIELD = "sampling.grammar"  # on the wire

_Content = TypeVar("_Content")
_Fitted = TypeVar("_Fitted")

# Of what a grammar may cost, in llguidance's own units, whose comments give their speed. The same on both sides, so
# that a mask exists on both or on neither.
_LIMITS = {
    "initial_lexer_fuel": 300_000,  # 50,000 a ms: 6 ms
    "step_lexer_fuel": 60_000,  # 14,000 a ms: 4 ms a mask
    "step_max_items": 10_000,  # of an ambiguous grammar 200 a ms: 50 ms
    "max_items_in_row": 1_000,  # four for each optional property of an object
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,  # it takes no notice of the fuel
    "verbose_errors": False,  # what a grammar holds is its client's
}


class Vocabulary:
    """Compiles grammars for the ids of one tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: TokenIds) -> None:
        """Takes llguidance's tokenizer; `open` makes it."""
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.num_tokens = int(tokenizer.vocab_size)

    @staticmethod
    def open(tokenizer_json: Path, num_tokens: int, eos_token_ids: TokenIds) -> Vocabulary:
        """Reads a tokenizer for a model with `num_tokens` ids. Raises `MissingExtraError` without llguidance, and
        `ModelError` for a tokenizer that it cannot read."""
        with needs_extra("structured", "a grammar"):
            import llguidance
        num_ids = max(num_tokens, fingerprint.num_tokens(tokenizer_json))  # a model may lack special tokens
        try:
            found = llguidance.LLTokenizer(
                str(tokenizer_json), n_vocab=num_ids, eos_token=list(eos_token_ids) or None
            )
        except Exception as error:  # the library raises bare ones
            raise ModelError(f"{tokenizer_json}: no grammars with this tokenizer: {error}") from error
        return Vocabulary(found, eos_token_ids)

    def compile(
        self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED, cost: GrammarCost = UNKNOWN_COST
    ) -> Grammar:
        """Returns the grammar with its compiled form, which keeps to its bounds, with what it took before. Raises
        `InvalidFieldError` naming what is wrong, and where, and `NoGrammarRoomError`."""
        import llguidance

        definition = _definition(grammar)

        def make_matcher(num_lexer_states: int) -> Any:
            limits = llguidance.LLParserLimits(**_LIMITS, max_lexer_states=num_lexer_states)
            matcher = llguidance.LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)
            if matcher.is_error():
                raise InvalidFieldError(FIELD, f"{grammar.kind}: {_in_short(matcher.get_error())}")
            return matcher

        def num_bytes_of(token_id: int) -> int:
            return len(self._tokenizer.decode_bytes([token_id]))

        ids = self.num_tokens, self.eos_token_ids
        return replace(grammar, compiled=CompiledGrammar(make_matcher, *ids, num_bytes_of, bounds, cost))

    def close(self) -> None:
        """Has nothing to free."""


def _definition(grammar: Grammar) -> str:
    """Returns what llguidance reads. Raises `InvalidFieldError` for a schema that is no JSON object, or has an integer
    that llguidance would change and that cannot be narrowed."""
    import llguidance

    make = llguidance.LLMatcher
    if grammar.kind is GrammarKind.REGEX:
        return str(make.grammar_from_regex(grammar.text))
    if grammar.kind is GrammarKind.LARK:
        return str(make.grammar_from_lark(_fit(fit_schemas_in, grammar.text, f"{grammar.kind}: %json")))
    try:
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict):
            raise ValueError("it is not an object")
        is_changed = _fit(fit_schema, schema, str(grammar.kind))
        text = json.dumps(schema) if is_changed else grammar.text
        options = {"whitespace_flexible": grammar.has_whitespace}
        return str(make.grammar_from_json_schema(text, overrides=options))
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(FIELD, f"{grammar.kind}: not a JSON schema: {error}") from error


def _fit(fit: Callable[[_Content], _Fitted], content: _Content, what: str) -> _Fitted:
    """Returns what `fit` does. Raises `InvalidFieldError` naming `what` and an integer that is not kept."""
    try:
        return fit(content)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(FIELD, f"{what}: {error}") from error


def _in_short(message: str) -> str:
    """Returns an error of the library in one line, without the frames that it may have."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(filter(None, lines))[:500]
