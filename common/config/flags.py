"""Command-line flags out of a configuration's fields."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Container
from typing import Any

from outrider.common.config.fields import Leaf, leaves, shown
from outrider.common.config.values import describe


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    without: tuple[str, ...] = (),
    title_of: Callable[[str], str] | None = None,
    only: Container[str] | None = None,
) -> None:
    """Add a flag for each field of `cls` and its sections but those in `without`, or for those in `only`.
    Values stay text; `load_config` converts them. `title_of` a key is the heading that help shows its flag
    under."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(cls):
        name = leaf.key.partition(".")[0]
        if not leaf.option.is_flag or name in without or (only is not None and name not in only):
            continue
        settings: dict[str, Any] = {
            "dest": leaf.key,
            "default": argparse.SUPPRESS,
            "help": f"{leaf.option.help} (default: {shown(leaf.default)})".replace("%", "%%"),
        }
        if leaf.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = leaf.option.metavar or _metavar(leaf)
            if typing.get_origin(leaf.kind) is tuple:
                settings["action"] = "append"
        if title_of is None:
            parser.add_argument(leaf.flag, **settings)
            continue
        title = title_of(leaf.key)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(leaf.flag, **settings)


def _metavar(leaf: Leaf) -> str:
    expected = describe(leaf.kind)
    choices = leaf.option.choices or (
        tuple(expected.removeprefix("one of ").split(", ")) if expected.startswith("one of ") else ()
    )
    return "|".join(choices) or leaf.key.rpartition(".")[2].upper()


def given_flags(namespace: argparse.Namespace, cls: type[Any]) -> dict[str, object]:
    """Return the flags of `cls` that were given, by dotted key, out of what `parse_args` returned."""
    given = vars(namespace)
    return {leaf.key: given[leaf.key] for leaf in leaves(cls) if leaf.key in given}
