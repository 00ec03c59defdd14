"""Tells a person how much of the weights is loaded."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from outrider.common.config.units import show_size
from outrider.common.process.progress import show_progress

log = logging.getLogger(__name__)

LOADING_THREAD = "loading"  # the name of the thread that models are loaded on
LINE_S, LOG_S = 0.1, 10.0  # between two changes of a terminal's line, and between two lines of a log


class LoadProgress:
    """Shows a line in place on a terminal until the `with` ends, else logs one now and then; neither at once."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._interval_s = LINE_S if self._is_terminal else LOG_S
        self._next_s = clock() + self._interval_s

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        show_progress("")

    def __call__(self, num_read: int, num_bytes: int) -> None:
        """Notes that so many bytes of all are read."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        line = f"loading {self._name}: {show_size(num_read)} of {show_size(num_bytes)}"
        if self._is_terminal:
            show_progress(line)
        else:
            log.info("%s", line)
