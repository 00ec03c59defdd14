"""The one loader of configuration: defaults < YAML file < environment < flags.

A configuration is a frozen dataclass; its fields come from `option` and may be dataclasses themselves:
sections. The key of a value in a section made by `section` is flat: `timeout_ms` in YAML,
OUTRIDER_<SCOPE>_TIMEOUT_MS in the environment, `--timeout-ms` as a flag. In any other section it is dotted:
`serve.listen` is `serve: {listen: ...}` in YAML, OUTRIDER_<SCOPE>_SERVE_LISTEN in the environment and
`--listen` as a flag. Every value keeps its origin. Nothing else reads `os.environ`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import typing
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from outrider.common.config.fields import (
    Leaf,
    Option,
    env_prefix,
    leaves,
    leaves_by_key,
    option,
    section,
    shown,
    shown_value,
)
from outrider.common.config.values import convert, describe, words_of
from outrider.common.errors import ConfigError

_NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})
_OFTEN = "used most"  # the title of flags that help lists first


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    without: tuple[str, ...] = (),
    is_grouped: bool = False,
    only: Container[str] | None = None,
    often: Sequence[str] = (),
    defaults: Mapping[str, object] = _NO_DEFAULTS,
) -> None:
    """Adds a flag for every setting of `cls`, or for those in `only`, but for the sections or settings named
    in `without`. Values stay strings: `load_config` converts them. `is_grouped` lists flags in help under
    the titles of their sections, those of the keys in `often` before all others. Help shows the default in `defaults`,
    by key, where the caller has another than `cls`."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in sorted(
        leaves(cls), key=lambda leaf: often.index(leaf.key) if leaf.key in often else len(often)
    ):
        name = leaf.key.partition(".")[0]
        if not leaf.option.is_flag or name in without or (only is not None and name not in only):
            continue
        default = shown(defaults.get(leaf.key, leaf.default))
        settings: dict[str, Any] = {
            "dest": leaf.key,
            "default": argparse.SUPPRESS,
            "help": f"{leaf.option.help} (default: {default})".replace("%", "%%"),
        }
        if leaf.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            names = "|".join(leaf.choices) or leaf.key.rpartition(".")[2].upper()
            settings["metavar"] = leaf.option.metavar or names
            if typing.get_origin(leaf.kind) is tuple:
                settings["action"] = "append"
        title = _OFTEN if leaf.key in often else leaf.title
        if is_grouped and title not in groups:
            groups[title] = parser.add_argument_group(title)
        (groups[title] if is_grouped else parser).add_argument(leaf.flag, **settings)


def given_flags(namespace: argparse.Namespace, cls: type[Any]) -> dict[str, object]:
    """Returns the flags of `cls` that were given, by key, out of what `parse_args` returned."""
    given = vars(namespace)
    return {leaf.key: given[leaf.key] for leaf in leaves(cls) if leaf.key in given}


__all__ = [
    "Loaded",
    "Option",
    "add_flags",
    "check_value",
    "given_flags",
    "load_config",
    "option",
    "section",
    "value_of",
    "with_values",
]

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """Holds a configuration and the origin of each value, by key."""

    value: ConfigT
    origins: dict[str, str]

    def lines(self, with_origins: bool = False) -> list[str]:
        """Returns `key: value` lines for `config show`, followed by `# origin` on request."""
        known = leaves(type(self.value))
        texts = {leaf.key: f"{leaf.key}: {shown_value(leaf, leaf.value_in(self.value))}" for leaf in known}
        width = max(map(len, texts.values()), default=0)
        return [f"{t:<{width}}  # {self.origins[k]}" if with_origins else t for k, t in texts.items()]


def load_config(
    cls: type[ConfigT],
    *,
    scope: str = "",
    yaml_path: Path | None = None,
    content: tuple[object, str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded[ConfigT]:
    """Returns a `cls` from its defaults, a YAML file, the environment and flags, the later ones winning.

    `content` replaces the file: what was read from it, and its name for messages. `env` defaults to the
    process's own; `flags` holds only those given, by key (`given_flags`). Raises ConfigError naming key,
    origin and what was expected; for an unknown key it names the nearest known one.
    """
    known = leaves_by_key(cls)
    values = {key: leaf.default for key, leaf in known.items()}
    origins = dict.fromkeys(known, "default")
    for key, raw, origin in (
        *_from_yaml(yaml_path, known),
        *(_flatten(content[0], "", known, content[1]) if content else ()),
        *_from_env(os.environ if env is None else env, known, scope),
        *_from_flags(flags or {}, known),
    ):
        values[key], origins[key] = check_value(known[key], raw, origin), origin
    return Loaded(_build(cls, {known[key].path: value for key, value in values.items()}), origins)


def with_values(config: ConfigT, **values: object) -> ConfigT:
    """Returns `config` with these settings changed, by key. Raises ConfigError as `load_config` does."""
    known = leaves_by_key(type(config))
    changed = {leaf.path: leaf.value_in(config) for leaf in known.values()}
    for key, raw in values.items():
        if key not in known:
            raise _unknown(key, "given", known)
        changed[known[key].path] = check_value(known[key], raw, "given")
    return _build(type(config), changed)


def value_of(config: object, key: str) -> Any:
    """Returns the value of one setting by its key."""
    return leaves_by_key(type(config))[key].value_in(config)


def _from_yaml(path: Path | None, known: Mapping[str, Leaf]) -> Iterator[tuple[str, object, str]]:
    if path is None:
        return
    content = read_yaml(path)
    yield from _flatten({} if content is None else content, "", known, f"file {path}")


def read_yaml(path: Path) -> Any:
    """Returns the file's content. Raises `ConfigError` naming the file where it cannot be read or is not YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _flatten(
    section: object, prefix: str, known: Mapping[str, Leaf], origin: str
) -> Iterator[tuple[str, object, str]]:
    if not isinstance(section, dict):
        where = f"{prefix.rstrip('.')} ({origin})" if prefix else origin
        raise ConfigError(f"{where}: expected a section of keys and values, not {shown(section)}")
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in known:
            yield key, value, origin
        elif any(each.startswith(f"{key}.") for each in known):
            yield from _flatten({} if value is None else value, f"{key}.", known, origin)
        else:
            raise _unknown(key, origin, known)


def _from_env(
    env: Mapping[str, str], known: Mapping[str, Leaf], scope: str
) -> Iterator[tuple[str, object, str]]:
    names = {leaf.env_name(scope): key for key, leaf in known.items()}
    assert len(names) == len(known), "two keys share an environment variable"
    for name in sorted(env):
        if name in names:
            yield names[name], env[name], f"environment {name}"
        elif name.startswith(env_prefix(scope)):
            raise _unknown(name, "environment", names)


def _from_flags(flags: Mapping[str, object], known: Mapping[str, Leaf]) -> Iterator[tuple[str, object, str]]:
    for key, value in flags.items():
        if key not in known:
            raise _unknown(key, "flag", known)
        yield key, value, f"flag {known[key].flag}"


def _unknown(key: str, origin: str, known: Mapping[str, Any]) -> ConfigError:
    return ConfigError(f"unknown key {key} ({origin}){did_you_mean(key, known)}")


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.0) -> str:
    """Returns the end of a message: the known name that begins with `name`, or else the nearest one whose
    `difflib` ratio is at least `likeness`; empty where there is none."""
    names = list(known)
    longer = [each for each in names if each.startswith(name)]
    nearest = longer or difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def check_value(leaf: Leaf, raw: object, origin: str) -> Any:
    """Returns `raw` converted to the type of one setting. Raises ConfigError as `load_config` does."""
    option, expected, given = leaf.option, describe(leaf.kind), shown_value(leaf, raw)
    if {"on", "off"} & {*leaf.choices, *words_of(leaf.kind)}:
        raw = [_switch_word(each) for each in raw] if isinstance(raw, list) else _switch_word(raw)
    if option.choices:
        expected = "one of " + ", ".join(option.choices)
    bounds = [f"at least {option.minimum:g}"] if option.minimum is not None else []
    bounds += [f"at most {option.maximum:g}"] if option.maximum is not None else []
    expected = ", ".join([expected, " and ".join(bounds)]) if bounds else expected
    try:
        value = convert(raw, leaf.kind)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{leaf.key} ({origin}): is {given}; expected {expected}") from error
    items = value if isinstance(value, tuple) else () if value is None else (value,)
    for item in items:
        is_number = not isinstance(item, str)
        is_low = is_number and option.minimum is not None and item < option.minimum
        is_high = is_number and option.maximum is not None and item > option.maximum
        if is_low or is_high or (option.choices and str(item) not in option.choices):
            raise ConfigError(f"{leaf.key} ({origin}): is {given}; expected {expected}")
    return value


def _switch_word(raw: object) -> object:
    """Returns what stood in YAML, which reads these words as booleans."""
    return ("on" if raw else "off") if isinstance(raw, bool) else raw


@cache
def _kinds(cls: Any) -> dict[str, Any]:
    """Returns the types of fields. A request makes two configurations; to evaluate them took 1.3 of 1.7 ms."""
    return typing.get_type_hints(cls)


def _build(cls: type[ConfigT], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> ConfigT:
    kinds = _kinds(typing.cast(Hashable, cls))
    arguments = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        here, kind = (*path, field.name), kinds[field.name]
        is_section = dataclasses.is_dataclass(kind)
        arguments[field.name] = (
            _build(typing.cast(type[Any], kind), values, here) if is_section else values[here]
        )
    return cls(**arguments)
