"""Shows progress on a terminal."""

from __future__ import annotations

import sys


def show_progress(line: str) -> None:
    """Shows a line on stderr in place of the one before; "" removes it. Does nothing where stderr is not a
    terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
