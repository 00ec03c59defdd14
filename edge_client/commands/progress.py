"""One line that a terminal shows while something takes its time."""

from __future__ import annotations

import sys


def show_progress(line: str) -> None:
    """On stderr, in place of the line before; "" leaves none. Nothing where it is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
