"""The edges of a sweep, as processes that stay: a job each at a time, answered as it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from outrider.common.errors import OutriderError, UsageError


class EdgeEndedError(OutriderError):
    """Is raised when the edge's process ended with a job under way."""


class EdgeProcess:
    """Runs `python -m outrider.experiments.sweep.worker`; what it logs goes to the end of `log`."""

    def __init__(self, log: Path) -> None:
        self._log: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.experiments.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Waits for the answer. Raises `UsageError` for what the product refuses, `EdgeEndedError`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is read below
        line = self._process.stdout.readline()
        if not line:
            raise EdgeEndedError(f"an edge's process ended; its last words are in {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "usage_error" in answer:
            raise UsageError(answer["usage_error"])
        return answer

    def kill(self) -> None:
        """Ends the process at once: whoever waits for an answer gets `EdgeEndedError`."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()  # the end of its input ends it
        except BrokenPipeError:
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class EdgePool:
    """Holds as many edges as any cell asked for so far."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._edges: list[EdgeProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        for edge in self._edges:
            edge.close()

    def take(self, number: int) -> Sequence[EdgeProcess]:
        """Returns so many edges, started where there are too few."""
        while len(self._edges) < number:
            self._edges.append(EdgeProcess(self._log))
        return self._edges[:number]

    def kill(self) -> None:
        """Ends every edge at once."""
        for edge in self._edges:
            edge.kill()
