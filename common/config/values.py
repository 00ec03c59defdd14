"""Converts one configuration value from a string or YAML to the type that its field declares."""

from __future__ import annotations

import contextlib
import enum
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TRUE, _FALSE = frozenset(("true", "yes", "on", "1")), frozenset(("false", "no", "off", "0"))


def convert(value: object, kind: Any) -> Any:
    """Returns `value` as `kind`: bool, int, float, str, Path, an enum, Literal, T | U (the first that it can be), T |
    None, tuple[T, ...] or Any.

    Strings (environment, flags) are parsed; YAML values must have the type already, except for numbers that
    YAML reads as strings ("1e-3"). Raises ValueError for any other value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and (value is None or value == "none"):
            return None
        for each in arguments:
            with contextlib.suppress(ValueError, KeyError):
                return convert(value, each)
        raise ValueError("none of the types")
    if origin is tuple:
        return tuple(convert(item, arguments[0]) for item in _items(value))
    if origin is typing.Literal:
        return _one_of(value, {str(choice): choice for choice in arguments})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of(value, {str(member.value): member for member in kind})
    return _SCALARS[kind](value)


def describe(kind: Any) -> str:
    """Returns what a value of this type looks like, for messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if each is type(None) else describe(each) for each in arguments)
    if origin is tuple:
        return f"a list, each item {describe(arguments[0])}"
    if choices := choices_of(kind):
        return "one of " + ", ".join(choices)
    return _NAMES[kind]


def choices_of(kind: Any) -> tuple[str, ...]:
    """Returns the values of an enum or a Literal as users write them; of any other type none."""
    if typing.get_origin(kind) is typing.Literal:
        return tuple(map(str, typing.get_args(kind)))
    is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
    return tuple(str(member.value) for member in kind) if is_enum else ()


def words_of(kind: Any) -> set[str]:
    """Returns the words that a value may be: of a union those of all its types, of a tuple those of an item."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple):
        return {word for each in typing.get_args(kind) for word in words_of(each)}
    return set(choices_of(kind))


def _items(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str):  # from the environment; a YAML list where an item has a comma
        if value.startswith("["):
            import yaml

            try:
                parsed = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ValueError(f"not a list: {value}") from error
            return list(parsed)
        return [item for item in value.split(",") if item]
    raise ValueError("not a list")


def _one_of(value: object, choices: dict[str, Any]) -> Any:
    if str(value) not in choices:
        raise ValueError("not a choice")
    return choices[str(value)]


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in _TRUE | _FALSE:
        raise ValueError("not a truth value")
    return text in _TRUE


def _to_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not an integer")
    return int(value)


def _to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    number = float(value)
    if math.isnan(number):
        raise ValueError("not a number")
    return number


def _to_str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    return value


def _to_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("not a path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~somebody who has no home here
        raise ValueError("not a path") from error


_SCALARS: dict[Any, Callable[[object], Any]] = {
    Any: lambda value: value,
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Path: _to_path,
}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
_NAMES[Any] = "any value"
