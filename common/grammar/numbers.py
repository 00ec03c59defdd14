"""Finds integers in schemas that a grammar cannot keep: llguidance has numbers as float64.

A text would otherwise obey another number, such as 18446744073709552000 for 18446744073709551615.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

_MAX_DIGITS_SHOWN = 40
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_VALUES = frozenset(("const", "enum"))
_BY_NAME = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)  # their keys are names, not keywords
_NO_SCHEMA = frozenset(("default", "examples"))
_IN_LARK = "%json"


def check_schema(schema: object) -> None:
    """Raises `ValueError` naming an integer among a schema's values and bounds that it does not keep."""
    waiting = [schema]  # a list, not calls: schemas may be deep
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        if not isinstance(each, dict):
            continue
        for key, value in each.items():
            if key in _BOUNDS or key in _VALUES:
                _check_integers(key, value)
            elif key in _BY_NAME and isinstance(value, dict):
                waiting += value.values()
            elif key not in _NO_SCHEMA:
                waiting.append(value)


def check_schemas_in(lark: str) -> None:
    """Does so for the schemas in a Lark grammar; what is no JSON there is left to llguidance."""
    decoder, end = json.JSONDecoder(), 0
    while (start := lark.find(_IN_LARK, end)) >= 0:
        end = start + len(_IN_LARK)
        begin = end + len(lark[end:]) - len(lark[end:].lstrip())
        try:
            schema, end = decoder.raw_decode(lark, begin)
        except json.JSONDecodeError:
            continue
        check_schema(schema)


def _check_integers(key: str, value: object) -> None:
    for each in _integers(value):
        if not _is_kept(each):
            shown = str(each)
            shown = shown if len(shown) <= _MAX_DIGITS_SHOWN else f"{shown[:_MAX_DIGITS_SHOWN]}…"
            raise ValueError(
                f"{key} has {shown}, which is not kept exactly (as float64, below 2^63): give it as a string"
            )


def _integers(value: object) -> Iterator[int]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, int) and not isinstance(each, bool):
            yield each


def _is_kept(value: int) -> bool:
    """Returns whether llguidance keeps an integer. Beyond 64 bits it writes other digits, and cuts bounds."""
    return abs(value) < 2**63 and int(float(value)) == value
