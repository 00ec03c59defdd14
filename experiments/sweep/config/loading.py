"""A sweep out of its YAML file: every mistake named with its fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from outrider.common.config.loader import load_config
from outrider.common.errors import ConfigError
from outrider.experiments.shared.command import read_mapping
from outrider.experiments.sweep.config.checks import check_sweep
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.experiments.sweep.config.settings import home_of

_SCOPE = "bench"
_HINT = "`edge-client bench --example` prints a file"


def load_sweep(path: Path | None, flags: Mapping[str, object] | None = None) -> SweepConfig:
    """Raises `UsageError` (mostly `ConfigError`) naming the key, its file and the fix."""
    content, origin = ({}, "no file") if path is None else (read_mapping(path, _HINT), f"file {path}")
    for key in content:
        if key not in _KEYS and (hint := home_of(key)):
            raise ConfigError(f"unknown key {key} ({origin}){hint}")
    given = {key: _as_list(key, value) for key, value in content.items()}
    loaded = load_config(SweepConfig, scope=_SCOPE, content=(given, origin), flags=flags).value
    check_sweep(loaded)
    return loaded


_KEYS = frozenset(field.name for field in dataclasses.fields(SweepConfig))
_AXES = frozenset(
    field.name for field in dataclasses.fields(SweepConfig) if str(field.type).startswith("tuple")
)


def _as_list(key: str, value: object) -> object:
    is_single = key in _AXES and (value is None or isinstance(value, str | int | float | Mapping))
    return [value] if is_single else value
