"""Command-line flags made from a configuration's fields."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Container
from typing import Any

from outrider.common.config.fields import leaves, shown


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    without: tuple[str, ...] = (),
    is_grouped: bool = False,
    only: Container[str] | None = None,
) -> None:
    """Adds a flag for every setting of `cls`, or for those in `only`, but for the sections or settings named
    in `without`. Values stay strings: `load_config` converts them. `is_grouped` lists flags in help under
    the titles of their sections."""
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
            names = "|".join(leaf.choices) or leaf.key.rpartition(".")[2].upper()
            settings["metavar"] = leaf.option.metavar or names
            if typing.get_origin(leaf.kind) is tuple:
                settings["action"] = "append"
        if is_grouped and leaf.title not in groups:
            groups[leaf.title] = parser.add_argument_group(leaf.title)
        (groups[leaf.title] if is_grouped else parser).add_argument(leaf.flag, **settings)


def given_flags(namespace: argparse.Namespace, cls: type[Any]) -> dict[str, object]:
    """Returns the flags of `cls` that were given, by key, out of what `parse_args` returned."""
    given = vars(namespace)
    return {leaf.key: given[leaf.key] for leaf in leaves(cls) if leaf.key in given}
