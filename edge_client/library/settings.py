"""Turns keyword arguments into configurations. Their names are the keys of `RunConfig`; there is no other list."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.common.config.fields import leaves_by_key
from outrider.common.config.loader import did_you_mean, load_config, with_values
from outrider.common.errors import ConfigError, UsageError
from outrider.edge_client.config.daemon import SECTION
from outrider.edge_client.config.flags import waiting_by_default, with_keys
from outrider.edge_client.config.grammar import KEYS
from outrider.edge_client.config.preset import with_preset
from outrider.edge_client.config.request_config import NoEffectError, request_config
from outrider.edge_client.config.request_settings import OF_OPENAI, OF_REQUESTS
from outrider.edge_client.config.run_config import SCOPE, RunConfig
from outrider.edge_client.core.options import ExecutionMode

NO_DRAFT = "none"
_KNOWN = leaves_by_key(RunConfig)
_OF_CALLS = (*OF_REQUESTS, *OF_OPENAI)
_ELSEWHERE = {
    "log_level": "set the level of Python's logger `outrider`",
    "otlp_endpoint": "set up OpenTelemetry in your program",
}


def client_config(
    address: str, draft: str | Path | None, settings: Mapping[str, object]
) -> tuple[RunConfig, bool | None]:
    """Returns the client's configuration, from defaults, the environment and `settings`, and whether a draft is loaded
    (None: where there is one). Raises `ConfigError`, for an unknown setting with the nearest one's name."""
    for name in settings:
        if name in _ELSEWHERE:
            raise ConfigError(f"{name} is no setting of a client", _ELSEWHERE[name])
        if name not in _KNOWN or name.startswith(f"{SECTION}."):
            raise ConfigError(f"unknown setting {name}{_nearest(name, _KNOWN)}")
    loaded = load_config(RunConfig, scope=SCOPE)
    with naming_keys():
        config = with_values(waiting_by_default(loaded).value, **_as_values(settings), verifier=address)
        config = with_preset(config)
    if draft == NO_DRAFT:
        return _without_draft(config, "mode" in settings or loaded.origins["mode"] != "default"), False
    return (config if draft is None else with_values(config, draft=str(draft))), None


def call_config(base: RunConfig, sampling: Mapping[str, object]) -> RunConfig:
    """Returns the configuration of one call; None leaves a setting as the client has it. Raises `ConfigError` for a
    wrong name or value, `UsageError` for a setting that would have no effect."""
    given = {name: value for name, value in sampling.items() if value is not None}
    for name in given:
        if name in _OF_CALLS:
            continue
        if name in _KNOWN and not name.startswith(f"{SECTION}."):
            raise ConfigError(f"{name} is no setting of a call", "give it to outrider.connect")
        raise ConfigError(f"unknown setting {name}{_nearest(name, _OF_CALLS)}")
    with naming_keys():
        return request_config(base, _as_values(given))


def checked_prompt(prompt: str | Iterable[int], num_tokens: int) -> str | list[int]:
    """Returns text as it is and token ids as ints. Raises `UsageError` for anything else, and for ids that the
    tokenizer lacks."""
    if isinstance(prompt, str):
        return prompt
    try:
        token_ids = [operator.index(each) for each in prompt]
    except TypeError as error:
        raise UsageError(
            f"prompt: expected text or the token ids of one text ({error})", "make one call for each prompt"
        ) from error
    if unknown := next((each for each in token_ids if not 0 <= each < num_tokens), None):
        raise UsageError(f"prompt: there is no token {unknown}", f"ids are from 0 to {num_tokens - 1}")
    return token_ids


@contextmanager
def naming_keys() -> Iterator[None]:
    """Raises errors about flags with the keywords' names instead."""
    try:
        yield
    except NoEffectError:
        raise
    except UsageError as error:
        message = with_keys(str(error))
        if message == str(error):
            raise
        raise (ConfigError if isinstance(error, ConfigError) else UsageError)(message) from error


def _without_draft(config: RunConfig, is_mode_given: bool) -> RunConfig:
    if not is_mode_given:
        return with_values(config, mode=ExecutionMode.CLOUD_ONLY)
    if config.mode.has_draft:
        raise ConfigError(
            f"draft='none' and mode={str(config.mode)!r}", "that mode drafts here: name a draft"
        )
    return config


def _nearest(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, [each for each in known if not each.startswith(f"{SECTION}.")])


def _as_values(given: Mapping[str, object]) -> dict[str, Any]:
    """Returns values as the configuration has them: one item as a list of it, biases as ID:B."""
    return {name: _as_value(name, value) for name, value in given.items()}


def _as_value(name: str, value: object) -> object:
    if name in KEYS.values():
        return _grammar_text(name, value)
    if not isinstance(_KNOWN[name].default, tuple):
        return value
    if isinstance(value, Mapping):
        return [f"{token_id}:{bias!r}" for token_id, bias in value.items()]
    return [value] if isinstance(value, str | int) else value


def _grammar_text(name: str, value: object) -> object:
    """Returns the text of a schema or grammar, of which a `Path` is read. Raises `ConfigError` for one that cannot be
    read or sent, and for an empty one, which would not say what the text obeys."""
    if name == "json_schema" and isinstance(value, Mapping):
        return json.dumps(value)
    try:
        text = value.read_text("utf-8") if isinstance(value, Path) else value
        if isinstance(text, str):
            text.encode()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{name}: cannot be read as UTF-8: {error}") from error
    if text == "":
        raise ConfigError(f"{name} is empty", "leave it out, or give None, where the text may be any")
    return text
