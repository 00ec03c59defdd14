"""YAML files that a person writes for an experiment: keys and values, read with mistakes named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.common.config.loader import read_yaml
from outrider.common.errors import ConfigError


def read_mapping(path: Path, example: str) -> dict[str, Any]:
    """Raises `ConfigError` naming the file; `example` ends the message where it holds something else."""
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected keys and values; {example}")
    return {str(key): value for key, value in content.items()}
