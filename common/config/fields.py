"""What a configuration's fields say about themselves, and the flat list of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """What a field says about itself beside its name, type and default; bounds are inclusive."""

    help: str
    flag: str | None = None  # default: --<field-name>
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    is_flag: bool = True  # False: only the file and the environment set it
    is_secret: bool = False  # its value is never shown


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field with a default and an `Option` (its fields as keywords)."""
    about = Option(help, **details)
    return dataclasses.field(default=default, repr=not about.is_secret, metadata={"option": about})


@dataclass(frozen=True)
class Leaf:
    key: str
    kind: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.key.rpartition(".")[2].replace("_", "-")

    def env_name(self, scope: str) -> str:
        return env_prefix(scope) + self.key.replace(".", "_").upper()


def env_prefix(scope: str) -> str:
    return f"OUTRIDER_{scope.upper()}_" if scope else "OUTRIDER_"


def leaves(cls: type[Any], prefix: str = "") -> Iterator[Leaf]:
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, key = kinds[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from leaves(typing.cast(type[Any], kind), key + ".")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert default is not dataclasses.MISSING, f"{cls.__name__}.{field.name} needs a default"
        yield Leaf(key, kind, default, field.metadata.get("option", Option("")))


def shown_value(leaf: Leaf, value: object) -> str:
    """As `shown`; of a secret only whether there is one."""
    return "<secret>" if leaf.option.is_secret and value else shown(value)


def shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return repr(value.value if hasattr(value, "value") else str(value) if isinstance(value, Path) else value)
