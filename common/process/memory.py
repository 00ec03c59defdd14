"""How a long-running process keeps memory, by the C library's means (glibc; elsewhere nothing happens), and how much it
had."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path

from outrider.common.config.units import show_size
from outrider.common.types import MemoryUse

_M_ARENA_MAX = -8  # mallopt's name for it
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_resident_bytes() -> int:
    """Returns the most memory that this process has had resident; 0 where the system does not say (not Linux)."""
    try:
        match = _PEAK.search(Path("/proc/self/status").read_text("ascii", "replace"))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def show_memory(use: MemoryUse) -> str:
    """Returns a verifier's memory for a person."""
    text = f"weights {show_size(use.weights)}, KV {show_size(use.kv)}"
    if not use.peak:
        return text
    kind = f"allocated, {show_size(use.peak_reserved)} reserved" if use.peak_reserved else "resident"
    return f"{text}, peak {show_size(use.peak)} {kind}"


def share_heaps(num_heaps: int) -> None:
    """Has the threads that begin from now on share so many heaps.

    With a heap for each, what a thread has freed is kept for that thread: a daemon of 30 threads grows for as long as
    there is one that has not had a large request yet (`make bench-reliability`, rel.soak). A second heap is for threads
    that allocate at the same time.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, num_heaps)


def give_back() -> None:
    """Gives freed memory back to the operating system, that of reference cycles too, which nothing else frees while
    little is allocated."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
