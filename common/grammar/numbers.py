"""Fits the integers of schemas to llguidance, which has numbers as float64: bounds are narrowed, values refused.

A text would otherwise obey another number, such as 18446744073709552000 for 18446744073709551615.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

_MAX_DIGITS_SHOWN = 40
_LOWER = frozenset(("minimum", "exclusiveMinimum"))
_BOUNDS = frozenset(("maximum", "exclusiveMaximum", *_LOWER))
_VALUES = frozenset(("const", "enum", "multipleOf"))
_END = 2**63  # from which on llguidance writes other digits
# Their keys are names, not keywords.
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_NO_SCHEMA = frozenset(("default", "examples"))
_IN_LARK = "%json"


def fit_schema(schema: object) -> bool:
    """Narrows a schema's bounds, in place, to the nearest integers that a grammar keeps, and returns whether it did: a
    text of the narrower ones obeys the schema. Raises `ValueError` naming a value, or a bound, for which there is
    none."""
    is_changed, waiting = False, [schema]  # a list, not calls: schemas may be deep
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        if not isinstance(each, dict):
            continue
        for key, value in each.items():
            if key in _VALUES:
                _check_integers(key, value)
            elif key in _BOUNDS and isinstance(value, int) and not isinstance(value, bool):
                each[key] = _narrowed(key, value)
                is_changed |= each[key] != value
            elif key in _BY_NAME and isinstance(value, dict):
                waiting += value.values()
            elif key not in _NO_SCHEMA:
                waiting.append(value)
    return is_changed


def fit_schemas_in(lark: str) -> str:
    """Returns a Lark grammar whose schemas are so narrowed; what is no JSON there is left to llguidance. Raises as
    `fit_schema`."""
    decoder, end, parts = json.JSONDecoder(), 0, list[str]()
    while (start := lark.find(_IN_LARK, end)) >= 0:
        begin = start + len(_IN_LARK)
        begin += len(lark[begin:]) - len(lark[begin:].lstrip())
        parts.append(lark[end:begin])
        try:
            schema, end = decoder.raw_decode(lark, begin)
        except json.JSONDecodeError:
            end = begin
            continue
        parts.append(json.dumps(schema) if fit_schema(schema) else lark[begin:end])
    return "".join((*parts, lark[end:]))


def _narrowed(key: str, bound: int) -> int:
    """Returns the nearest bound that a grammar keeps."""
    sign = -1 if key in _LOWER else 1
    found = sign * _at_most(sign * bound)
    if not _is_kept(found):
        raise _not_kept(key, bound)
    return found


def _at_most(value: int) -> int:
    """Returns the largest float64 below 2^63 that is no more than an integer."""
    if value >= _END:
        return int(math.nextafter(_END, 0.0))
    nearest = float(max(value, -_END))
    return int(nearest if nearest <= value else math.nextafter(nearest, -math.inf))


def _check_integers(key: str, value: object) -> None:
    for each in _integers(value):
        if not _is_kept(each):
            raise _not_kept(key, each)


def _not_kept(key: str, value: int) -> ValueError:
    shown = str(value)
    shown = shown if len(shown) <= _MAX_DIGITS_SHOWN else f"{shown[:_MAX_DIGITS_SHOWN]}…"
    return ValueError(
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
    """Returns whether llguidance keeps an integer."""
    return abs(value) < _END and int(float(value)) == value
