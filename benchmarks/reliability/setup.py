"""Holds what the stages share: how long they are, progress, and verifiers that are killed and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.experiments.shared.processes import READY, kept_address

QUIET = ("--log-level", "error")
START_TIMEOUT_S = 120.0


@dataclass
class Settings:
    """Says how much a stage does: `long` for the figures, else a short form that shows that all of it works."""

    is_long: bool = False
    is_smoke: bool = False  # a test's: seconds in all
    begin_s: float = field(default_factory=time.monotonic)

    def pick(self, long: Any, short: Any, smoke: Any = None) -> Any:
        """Returns the value for the long form, the short one, or a test."""
        if self.is_smoke and smoke is not None:
            return smoke
        return long if self.is_long else short

    def say(self, line: str) -> None:
        """Prints a line of progress."""
        print(f"  {time.monotonic() - self.begin_s:6.0f} s  {line}", flush=True)


class MortalVerifier:
    """Serves on one address, is killed by SIGKILL and comes back there, as often as asked.

    Each one is a fork of a process that has imported what `cloud-verifier serve` imports, which takes most of a
    start; it then runs that command.
    """

    def __init__(self, *flags: str, module: str = "outrider.cloud_verifier.server.cli") -> None:
        self.num_kills = 0
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reliability.forked", module, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._kept = contextlib.ExitStack()
        self.address = self._kept.enter_context(kept_address())
        self._pid = self._start()

    def kill(self) -> None:
        """Ends the verifier as a crash would."""
        os.kill(self._pid, signal.SIGKILL)
        self.num_kills += 1

    def revive(self) -> float:
        """Starts another on the same address; returns the monotonic time at which it served."""
        self._pid = self._start()
        return time.monotonic()

    def _start(self) -> int:
        parent = self._parent
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(self.address + "\n")
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        for line in parent.stdout:
            if READY.search(line):
                return pid
        raise RuntimeError(f"the verifier did not start: {parent.wait()}")

    def close(self) -> None:
        """Ends the verifier and its parent."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(START_TIMEOUT_S)
        self._parent.stdout.close()
        self._kept.close()


@contextlib.contextmanager
def mortal_verifier(
    *flags: str, module: str = "outrider.cloud_verifier.server.cli"
) -> Iterator[MortalVerifier]:
    """Runs a verifier that can be killed: `with mortal_verifier() as verifier: ... verifier.kill()`."""
    verifier = MortalVerifier(*flags, module=module)
    try:
        yield verifier
    finally:
        verifier.close()
