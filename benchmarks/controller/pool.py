"""Processes that play points beside each other."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def fresh_processes(**options: Any) -> ProcessPoolExecutor:
    """Returns a pool of new interpreters, one a core. A fork of this process would copy locks that its threads hold
    (gRPC's, where tests ran before), and may end abruptly. `options` are those of `ProcessPoolExecutor`."""
    return ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), **options)
