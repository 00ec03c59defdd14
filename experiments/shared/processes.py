"""A verifier as a real process: start, wait until it serves, stop. For the demo, benchmarks and tests.

It is in a session of its own: Ctrl-C at a terminal is for whoever started it, which then stops it after what
it serves. It ends with that process, killed or not (`outrider.experiments.shared.leash`).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

READY = re.compile(r"serving .* on (\S+:\d+)(?:, admin port at (\S+))?")


@dataclass
class VerifierProcess:
    """Holds a server's process. `address` is `HOST:PORT`; `admin_url` is empty without an admin port.

    `stop` and `kill` end the process, each at most once.
    """

    process: subprocess.Popen[str]
    address: str
    start_s: float  # from the start of the process until it served
    admin_url: str = ""

    def stop(self, timeout_s: float = 20.0) -> int:
        """Sends SIGTERM and waits; SIGKILL when it does not end in time. Returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self._reap()

    def kill(self) -> int:
        """Sends SIGKILL, as a crash would end it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        return self._reap()

    def _reap(self) -> int:
        status = self.process.wait()
        _close_pipes(self.process)
        return status


@contextlib.contextmanager
def kept_address() -> Iterator[str]:
    """Yields an address `HOST:PORT` on loopback for servers that follow one another. Between two of them connections
    are refused, and nobody else is given the port: it stays bound, without listening. A server can listen there
    all the same where it sets SO_REUSEADDR, as gRPC's do."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        host, port = holder.getsockname()
        yield f"{host}:{port}"


def start_verifier(
    *arguments: str,
    target: Path | None = None,
    listen: str = "127.0.0.1:0",
    timeout_s: float = 120.0,
    python: str = sys.executable,
) -> VerifierProcess:
    """Starts `cloud-verifier serve` in the environment of the interpreter `python`, on the CPU unless `arguments` name
    another --device: results of a machine with a GPU and of one without compare.

    Raises RuntimeError with its last output when it ends or stays silent for `timeout_s`.
    """
    command = [python, "-m", "outrider.cloud_verifier", "serve", "--listen", listen]
    command += ["--admin-listen", "none", "--device", "cpu", *arguments]  # several may run at once
    if target is not None:
        command += ["--target", str(target)]
    return start_server(command, timeout_s)


def start_server(
    command: Sequence[str], timeout_s: float = 120.0, stderr: TextIO | None = None
) -> VerifierProcess:
    """Starts `command`, a `python -m MODULE ...`, and waits for the line that says where it serves. `stderr`
    is a file for its log (None: ours). Raises as `start_verifier`."""
    assert command[1] == "-m", "only modules can be put on the leash"
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command[:2], "outrider.experiments.shared.leash", *command[2:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    return wait_until_serving(process, begin, timeout_s)


def wait_until_serving(process: subprocess.Popen[str], begin: float, timeout_s: float) -> VerifierProcess:
    """Waits for the line in which a process started at `begin` names its address. Raises as `start_verifier`."""
    assert process.stdout is not None
    output: list[str] = []
    for line in _lines_until(process.stdout.fileno(), begin + timeout_s):
        output.append(line)
        if match := READY.search(line):
            start_s = time.monotonic() - begin
            return VerifierProcess(process, match.group(1), start_s, match.group(2) or "")
    process.kill()
    process.wait()
    _close_pipes(process)
    raise RuntimeError(f"the verifier did not start: {process.args!r}\n" + "\n".join(output))


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _lines_until(descriptor: int, deadline: float) -> Iterator[str]:
    buffer = b""
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], remaining)[0]:
            return
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


@contextlib.contextmanager
def running_verifier(
    *arguments: str, target: Path | None = None, python: str = sys.executable
) -> Iterator[VerifierProcess]:
    """Runs a verifier: `with running_verifier() as verifier: ... verifier.address`."""
    verifier = start_verifier(*arguments, target=target, python=python)
    try:
        yield verifier
    finally:
        verifier.stop()


def run_edge(
    arguments: Sequence[str], timeout_s: float = 300.0, prompt: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `edge-client ARGUMENTS` in this interpreter's environment, output captured."""
    command = [sys.executable, "-m", "outrider.edge_client", *arguments]
    return subprocess.run(
        command, input=prompt, capture_output=True, text=True, timeout=timeout_s, check=False
    )
