"""Ends a command that cannot go on: one line for a person, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from outrider.common.errors import OutriderError


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
