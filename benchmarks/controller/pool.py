"""Processes that play points beside each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from outrider.experiments.shared.leash import end_with_parent


def fresh_processes(initializer: Callable[..., None] | None = None, *initargs: Any) -> ProcessPoolExecutor:
    """Returns a pool of new interpreters, one a core, that end with this one, killed or not. A fork of this process
    would copy locks that its threads hold (gRPC's, where tests ran before), and may end abruptly. Each calls
    `initializer` with `initargs` first."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(mp_context=context, initializer=_begin, initargs=(initializer, *initargs))


def _begin(initializer: Callable[..., None] | None, *initargs: Any) -> None:
    end_with_parent()
    if initializer is not None:
        initializer(*initargs)
