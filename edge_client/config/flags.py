"""Adds the configuration's flags to a verb, and loads the configuration that they and the other sources
give."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from outrider.common.config.fields import leaves
from outrider.common.config.loader import Loaded, add_flags, given_flags, load_config, with_values
from outrider.common.errors import UsageError
from outrider.edge_client.config.daemon import SECTION
from outrider.edge_client.config.preset import with_preset
from outrider.edge_client.config.run_config import SCOPE, RunConfig
from outrider.edge_client.core.options import OnTimeout

_FLAG = re.compile(r"--[a-z][a-z-]+")
_KEYS = {leaf.flag: leaf.key for leaf in leaves(RunConfig)}

_OFTEN = (
    "verifier",
    "draft",
    "mode",
    "max_new_tokens",
    "temperature",
    "seed",
    "stop",
    "tree",
    "on_timeout",
)

_OF_SERVE = {"on_timeout": OnTimeout.WAIT, "log_level": "info", "max_new_tokens": None}  # its defaults

COLOUR_NOTE = (
    "On a terminal, accepted drafts are green, the target's corrections yellow, unverified tokens red and "
    "underlined; NO_COLOR=1 turns colours off."
)
CONFIG_NOTE = "Flags from --verifier on are also keys of --config FILE and variables OUTRIDER_EDGE_<KEY>."


def add_config(parser: argparse.ArgumentParser, words: str = "", has_serve: bool = False) -> None:
    """Adds the flags. `words` are the verb's arguments beside options. `has_serve` adds the flags of the
    section `serve`, which every verb takes in its file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    without, defaults = ((), _OF_SERVE) if has_serve else ((SECTION,), {})
    add_flags(parser, RunConfig, without=without, is_grouped=True, often=_OFTEN, defaults=defaults)
    parser.usage = f"%(prog)s [OPTION ...] {words}".rstrip()  # argparse would name every option


def add_grammar_files(parser: argparse.ArgumentParser) -> None:
    """Adds `--json-schema FILE` and `--grammar FILE`."""
    parser.add_argument(
        "--json-schema",
        dest="json_schema_file",
        type=Path,
        metavar="FILE",
        help="JSON schema that the text obeys (extra structured)",
    )
    parser.add_argument(
        "--grammar",
        dest="grammar_file",
        type=Path,
        metavar="FILE",
        help="Lark grammar, in llguidance's dialect, that the text obeys (extra structured)",
    )


def grammar_texts(namespace: argparse.Namespace) -> dict[str, str]:
    """Returns the texts of `--json-schema FILE` and `--grammar FILE`, by key. Raises `UsageError`."""
    files = {"json_schema": namespace.json_schema_file, "grammar": namespace.grammar_file}
    return {key: _text_of(path, key) for key, path in files.items() if path is not None}


def _text_of(path: Path, key: str) -> str:
    flag = f"--{key.replace('_', '-')}"
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: cannot read {path}: {error}") from error
    if not text.strip():
        raise UsageError(f"{flag}: {path} is empty")
    return text


def load_run_config(namespace: argparse.Namespace) -> Loaded[RunConfig]:
    """Returns the configuration, a preset's settings in it. Raises `ConfigError` naming key, origin and what was
    expected, `UsageError` for settings that do not go with a preset."""
    loaded = load_config(
        RunConfig, scope=SCOPE, yaml_path=namespace.config, flags=given_flags(namespace, RunConfig)
    )
    return Loaded(with_preset(loaded.value), loaded.origins)


def waiting_by_default(loaded: Loaded[RunConfig]) -> Loaded[RunConfig]:
    """Returns the configuration with `wait` as default policy: marks of unverified tokens reach few readers of
    what a program generates."""
    return _with_defaults(loaded, {"on_timeout": OnTimeout.WAIT})


def without_token_limit(loaded: Loaded[RunConfig]) -> Loaded[RunConfig]:
    """Returns the configuration with no limit of tokens by default, as answers of a conversation have none."""
    return _with_defaults(loaded, {"max_new_tokens": None})


def with_serve_defaults(loaded: Loaded[RunConfig]) -> Loaded[RunConfig]:
    """Returns the configuration with the defaults of `serve`, where those are others."""
    return _with_defaults(loaded, _OF_SERVE)


def _with_defaults(loaded: Loaded[RunConfig], defaults: Mapping[str, object]) -> Loaded[RunConfig]:
    ours = {key: value for key, value in defaults.items() if loaded.origins[key] == "default"}
    return Loaded(with_values(loaded.value, **ours), loaded.origins)


def keys_of_flags(message: str) -> list[str]:
    """Returns the keys of the flags that a message names, in order."""
    return [_key(flag) for flag in _FLAG.findall(message)]


def with_keys(message: str) -> str:
    """Returns a message with the keys of its flags in their place, for those who give settings by key."""
    return _FLAG.sub(lambda match: _key(match[0]), message)


def _key(flag: str) -> str:
    return _KEYS.get(flag, flag.removeprefix("--").replace("-", "_"))
