"""Tells which answers are not written yet, so that steps do not run ahead of them. Lives on the event loop.

gRPC reports a written message on a thread of its own, and a stream's next message is written after that. Where steps
follow one another on the event loop and all processors compute, that thread may get no turn for many steps: tokens of
16 streams then came every 180 ms, 40 at once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator


class WaitAllowance:
    """Bounds what all waits take to a share of the time, and one longest wait more."""

    def __init__(self, longest_s: float, share: float) -> None:
        self._left_s = self._longest_s = longest_s
        self._share = share
        self._since_s = 0.0

    def left_s(self, now_s: float) -> float:
        """Returns how long a wait that begins now may last."""
        self._left_s = min(self._longest_s, self._left_s + self._share * (now_s - self._since_s))
        self._since_s = now_s
        return self._left_s

    def waited(self, now_s: float) -> None:
        """Notes the end of a wait, which began when `left_s` was asked for last."""
        self._left_s -= now_s - self._since_s
        self._since_s = now_s


class Delivery:
    """Counts writes by the step that they followed."""

    def __init__(self) -> None:
        self._step = 0
        self._unwritten: Counter[int] = Counter()  # writes under way, by the steps that had begun before them
        self._on_written: Callable[[], None] | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Counts a write that is under way within."""
        step = self._step
        self._unwritten[step] += 1
        try:
            yield
        finally:
            self._unwritten[step] -= 1
            if not self._unwritten[step]:
                del self._unwritten[step]
            if self._on_written is not None and not self.is_behind:
                on_written, self._on_written = self._on_written, None
                on_written()

    def step_begins(self) -> None:
        """Notes that a step begins."""
        self._step += 1

    @property
    def is_behind(self) -> bool:
        """Returns whether a write that began before the last step is not done. One of an earlier step is that of a
        client that does not read, and does not count."""
        return self._step - 1 in self._unwritten

    def call_when_written(self, callback: Callable[[], None] | None) -> None:
        """Calls `callback` once nothing is behind any more, and no earlier one; None: nothing."""
        self._on_written = callback
