"""Schemas by chance: nested objects, enums, arrays, patterns and unions, with bounded strings and arrays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NUM_SCHEMAS = 200
_WORDS = "name path kind size mode owner tags items value line start stop text flags index".split()
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(red|green|blue)_[0-9]$", "^[a-f0-9]{8}$")
_MAX_DEPTH = 3

Schema = dict[str, Any]


def make_schemas(number: int = NUM_SCHEMAS, seed: int = 26) -> list[Schema]:
    """Returns as many schemas, each of an object."""
    chance = random.Random(seed)
    return [_object(chance, 0) for _ in range(number)]


def _any(chance: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random, int], Schema]] = [
        _string,
        _integer,
        _number,
        _enum,
        _pattern,
        _boolean,
    ]
    nested: list[Callable[[random.Random, int], Schema]] = [_object, _array, _union]
    return chance.choice(leaves + (nested * 2 if depth < _MAX_DEPTH else []))(chance, depth)


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(_WORDS, chance.randint(1, 4))
    required = [name for name in names if chance.random() < 0.7]
    properties = {name: _any(chance, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": _any(chance, depth + 1),
        "minItems": chance.randint(0, 2),
        "maxItems": 3,
    }


def _union(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth + 1) for _ in range(chance.randint(2, 3))]}


def _string(chance: random.Random, depth: int) -> Schema:
    return {"type": "string", "maxLength": chance.randint(4, 24)}


def _integer(chance: random.Random, depth: int) -> Schema:
    low = chance.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + chance.choice((9, 500, 10_000))}


def _number(chance: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": chance.choice((1, 100))}


def _enum(chance: random.Random, depth: int) -> Schema:
    return {"enum": chance.sample(["open", "closed", "a b", "ü", 1, 2.5, None, True], chance.randint(2, 5))}


def _pattern(chance: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": chance.choice(_PATTERNS)}


def _boolean(chance: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}
