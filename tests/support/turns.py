"""Tests that must run alone, among workers that run tests side by side (pytest-xdist).

A reader-writer lock of two locked files: a test shares the machine, or has it, and one that waits to have it
is not overtaken by those that come later.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # said, as a forked process may hold the same file open


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Of a process that has locked nothing in `folder` yet; waits as long as it takes."""
    with contextlib.ExitStack() as held:
        with _locked(folder / "door", fcntl.LOCK_EX):
            held.enter_context(_locked(folder / "room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
