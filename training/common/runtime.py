"""Process settings that make CPU training faster and change no result."""

import ctypes
import os
import sys

from outrider.experiments.sweep.machine import cpu_model

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory instead of giving it back to the kernel. False where there is no
    glibc.

    A training step allocates and frees the same hundreds of megabytes; by default each block over 32 MB is
    mapped and unmapped every time, and a third of the processor goes into zeroing pages (measured).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 << 20), (_M_ARENA_MAX, 1))
    accepted = [mallopt(name, value) for name, value in settings]  # each is to be tried
    return all(accepted)


def describe_machine(device: str = "cpu") -> str:
    """Returns what a run ran on, in words, for reports: the GPU, or the processor and its number of cores."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} cores, {cpu_model()}"
