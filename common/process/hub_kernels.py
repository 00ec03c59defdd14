"""Keeps bitsandbytes from downloading anything."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Hides Hugging Face's package `kernels`, if it is installed: bitsandbytes downloads a kernel by it when it is
    imported, on some CPUs, and nothing of ours downloads."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, missing = log.level, object()
    before: Any = sys.modules.get("kernels", missing)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    log.setLevel(logging.ERROR)  # it would advise to install that package
    try:
        yield
    finally:
        log.setLevel(level)
        if before is missing:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before
