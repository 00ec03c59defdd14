"""Verifiers as real processes, forked from one that has imported what they need: 7 s of each start are imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from outrider.experiments.shared import leash
from outrider.experiments.shared.processes import VerifierProcess, wait_until_serving

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "outrider.cloud_verifier.backends.paged_backend",
        "outrider.cloud_verifier.server.cli",
        "outrider.cloud_verifier.server.server",
        "outrider.kernels.host.rows",
    ]
)


class ForkedProcess:
    """The part of `subprocess.Popen` that `VerifierProcess` uses."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.args = arguments
        child_in, self.stdin = _CONTEXT.Pipe(duplex=False)
        self.stdout, child_out = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(child_in, child_out, arguments), daemon=True)
        self._process.start()
        child_in.close()
        child_out.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _run(stdin: Connection, stdout: Connection, arguments: Sequence[str]) -> None:
    """Does what `python -m outrider.experiments.shared.leash ARGUMENTS` does."""
    os.setsid()
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False)
    sys.argv = ["leash", *arguments]
    leash.main()


def start_server(*arguments: str) -> VerifierProcess:
    """Starts `python -m ARGUMENTS` and waits for the line that says where it serves."""
    begin = time.monotonic()
    return wait_until_serving(ForkedProcess(arguments), begin, timeout_s=120.0)  # type: ignore[arg-type]


def start_verifier(
    *arguments: str, target: Path | None = None, listen: str = "127.0.0.1:0"
) -> VerifierProcess:
    given = ["--target", str(target)] if target is not None else []
    serve = [
        "outrider.cloud_verifier",
        "serve",
        "--listen",
        listen,
        "--admin-listen",
        "none",
        "--device",
        "cpu",
    ]
    return start_server(*serve, *given, *arguments)


@contextlib.contextmanager
def running_verifier(
    *arguments: str, target: Path | None = None, listen: str = "127.0.0.1:0"
) -> Iterator[VerifierProcess]:
    verifier = start_verifier(*arguments, target=target, listen=listen)
    try:
        yield verifier
    finally:
        verifier.stop()
