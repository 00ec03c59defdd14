"""How a long-running process keeps memory, by the C library's means (glibc; elsewhere nothing happens)."""

from __future__ import annotations

import contextlib
import ctypes

_MAX_HEAPS = 2
_M_ARENA_MAX = -8  # mallopt's name for it


def use_few_heaps() -> None:
    """Has the threads that begin from now on share two heaps.

    With a heap for each, what a thread has freed is kept for that thread: a daemon of 30 threads grows for as long as
    there is one that has not had a large request yet (`make bench-reliability`, rel.soak).
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_HEAPS)


def give_back() -> None:
    """Gives freed memory back to the operating system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
