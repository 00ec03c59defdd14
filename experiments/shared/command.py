"""Ends a command that cannot go on: one line for a person, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from outrider.common.config.loader import read_yaml
from outrider.common.errors import ConfigError, OutriderError


def read_mapping(path: Path, example: str) -> dict[str, Any]:
    """Raises `ConfigError` naming the file; `example` ends the message where it holds something else."""
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected keys and values; {example}")
    return {str(key): value for key, value in content.items()}


def run_command(name: str, main: Callable[[], int]) -> NoReturn:
    """Exits with what `main` returns, an `OutriderError`'s own status, or 130 after Ctrl-C."""
    try:
        status = main()
    except OutriderError as error:
        print(f"{name}: {error}", file=sys.stderr)
        status = error.exit_code
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
