"""Shows progress of a sweep: a bar with the time left at a terminal, plain lines on a pipe, nothing with --json."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

_LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Shows how far a sweep is."""

    def begin(self) -> None:
        """Starts the clock: from here on requests take the time."""

    def step(self, what: str) -> None:
        """Counts one more request; `what` names its cell."""

    def say(self, text: str) -> None:
        """Prints a line of its own."""

    def close(self) -> None:
        """Ends the display."""


class _Silent:
    def begin(self) -> None: ...

    def step(self, what: str) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    def __init__(self, total: int, done: int, out: TextIO) -> None:
        self._total, self._first, self._done = total, done, done
        self._out = out
        self.begin()
        self.say(f"{total - done} requests to run" + (f", {done} done before" if done else ""))

    def begin(self) -> None:
        self._start_s = time.monotonic()
        self._next_s = self._start_s + _LINE_EVERY_S

    def step(self, what: str) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s < self._next_s and self._done < self._total:
            return
        self._next_s = now_s + _LINE_EVERY_S
        left_s = (now_s - self._start_s) / (self._done - self._first) * (self._total - self._done)
        self.say(f"{self._done} of {self._total} requests, {_minutes(left_s)} left: {what}")

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def close(self) -> None: ...


class _Bar:
    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit="req", dynamic_ncols=True, smoothing=0.02)

    def begin(self) -> None:
        self._bar.unpause()

    def step(self, what: str) -> None:
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def create_progress(total: int, done: int, is_silent: bool) -> Progress:
    """Returns a bar at a terminal, lines on a pipe, nothing where it is silent."""
    if is_silent:
        return _Silent()
    return _Bar(total, done) if sys.stderr.isatty() else _Lines(total, done, sys.stderr)


def _minutes(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
