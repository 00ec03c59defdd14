"""The fields of a configuration: their descriptions, and the flat list of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.common.config.values import choices_of

# Settings have at most lists of numbers; a request's value may be nested as deep as JSON is read.
_MAX_DEPTH_SHOWN = 8


@dataclass(frozen=True)
class Option:
    """Describes a field beyond its name, type and default; bounds are inclusive."""

    help: str
    key: str | None = None  # default: the section's prefix and the field's name
    flag: str | None = None  # default: --<last part of the key>
    metavar: str | None = None
    choices: tuple[str, ...] | None = None  # default: those of its type, an enum or a Literal
    minimum: float | None = None
    maximum: float | None = None
    title: str | None = None  # heading of its flag in help; default: the section's
    is_flag: bool = True  # False: only the file and the environment set it
    is_secret: bool = False  # its value is never shown


@dataclass(frozen=True)
class Section:
    """Describes a field that is a configuration itself. Without one, keys begin with `<field>.`."""

    prefix: str
    title: str = ""


def option(default: Any, help: str, **details: Any) -> Any:
    """Returns a dataclass field with a default and an `Option`, whose other fields are the keywords."""
    about = Option(help, **details)
    return dataclasses.field(default=default, repr=not about.is_secret, metadata={"option": about})


def section(cls: type[Any], prefix: str = "", title: str = "") -> Any:
    """Returns a dataclass field that holds a `cls`. Its keys stay flat: `prefix` and the field's name."""
    return dataclasses.field(default_factory=cls, metadata={"section": Section(prefix, title)})


@dataclass(frozen=True)
class Leaf:
    """Holds one setting: the key that users write, and where the configuration has its value."""

    key: str
    path: tuple[str, ...]  # names of attributes, from the configuration to the value
    kind: Any
    default: Any
    option: Option
    title: str

    @property
    def flag(self) -> str:
        """Returns the setting's flag, with its dashes."""
        return self.option.flag or "--" + self.key.rpartition(".")[2].replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the allowed values; empty where they cannot be listed."""
        return self.option.choices or choices_of(self.kind)

    def env_name(self, scope: str) -> str:
        """Returns the environment variable that sets it."""
        return env_prefix(scope) + self.key.replace(".", "_").upper()

    def value_in(self, config: Any) -> Any:
        """Returns its value in `config`."""
        for name in self.path:
            config = getattr(config, name)
        return config


def env_prefix(scope: str) -> str:
    """Returns the beginning of every environment variable of a scope."""
    return f"OUTRIDER_{scope.upper()}_" if scope else "OUTRIDER_"


def leaves(cls: type[Any]) -> tuple[Leaf, ...]:
    """Returns the settings of `cls` and of its sections, in the order of their fields."""
    return _cached_leaves(typing.cast(Hashable, cls))  # mypy does not take a class to be hashable


def leaves_by_key(cls: type[Any]) -> dict[str, Leaf]:
    """Returns the settings of `cls` and of its sections by key."""
    return {leaf.key: leaf for leaf in leaves(cls)}


@cache
def _cached_leaves(cls: Any) -> tuple[Leaf, ...]:
    return tuple(_leaves(cls, Section(""), ()))


def _leaves(cls: type[Any], within: Section, path: tuple[str, ...]) -> Iterator[Leaf]:
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, key, here = kinds[field.name], within.prefix + field.name, (*path, field.name)
        if dataclasses.is_dataclass(kind):
            inner = field.metadata.get("section", Section(f"{key}."))
            yield from _leaves(typing.cast(type[Any], kind), inner, here)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert default is not dataclasses.MISSING, f"{cls.__name__}.{field.name} needs a default"
        about = field.metadata.get("option", Option(""))
        yield Leaf(about.key or key, here, kind, default, about, about.title or within.title)


def shown_value(leaf: Leaf, value: object) -> str:
    """Returns `value` as `shown` does; of a secret only that there is one."""
    return "<secret>" if leaf.option.is_secret and value else shown(value)


def shown(value: object, max_depth: int = _MAX_DEPTH_SHOWN) -> str:
    """Returns a value as YAML would have it, for `config show` and messages; what is nested deeper is left out."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | dict) and max_depth == 0:
        return "…"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(shown(each, max_depth - 1) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(each, max_depth - 1)}" for key, each in value.items()) + "}"
    return repr(value.value if hasattr(value, "value") else str(value) if isinstance(value, Path) else value)
