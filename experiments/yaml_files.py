"""YAML files that a person writes for an experiment: keys and values, read with mistakes named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def read_mapping(path: Path, example: str) -> dict[str, Any]:
    """Raises `ConfigError` naming the file; `example` ends the message where it holds something else."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected keys and values; {example}")
    return {str(key): value for key, value in content.items()}
