"""A link that a helper process keeps up: this is the end that the user of the link holds.

The helper (`outrider.experiments.links.helper`) is a process of its own, so that its timers do not wait for this one's
work. It ends when its standard input does, however this process ends, and the kernel takes back what it made.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from outrider.common.errors import LinkError, UsageError
from outrider.experiments.links.profile import LinkProfile

_CLOSE_S = 5.0


class RemoteLink:
    """Is an `OpenLink` that a helper process serves."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._opened = self._read()

    @property
    def address(self) -> str:
        """Returns the HOST:PORT to dial."""
        return str(self._opened["address"])

    @property
    def process_id(self) -> int:
        """Returns the helper's process id."""
        return self._process.pid

    def facts(self) -> dict[str, Any]:
        """Returns the helper's facts, with the realisation's name."""
        return {**self._opened["facts"], **self._ask("facts")}

    def wire_bytes(self) -> tuple[int, int] | None:
        """Returns the bytes carried so far, up and down."""
        counted = self._ask("wire_bytes")
        return int(counted["up"]), int(counted["down"])

    def restart_outages(self) -> None:
        """Lets outages count from now on."""
        self._ask("restart_outages")

    def reset(self) -> int:
        """Breaks every connection; returns how many."""
        return int(self._ask("reset")["num_connections"])

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(what + "\n")
                self._process.stdin.flush()
            except OSError as error:
                raise LinkError(f"the link at {self.address} is gone: its helper process ended") from error
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LinkError(f"the link's helper process ended with status {self._process.wait(_CLOSE_S)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer


@contextlib.contextmanager
def remote_link(realisation: str, profile: LinkProfile, upstream: str) -> Iterator[RemoteLink]:
    """Starts the helper and waits for its address.

    Raises UsageError with the helper's own words when it cannot make the link, LinkError when it dies.
    """
    request = json.dumps({"realisation": realisation, "profile": asdict(profile), "upstream": upstream})
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.experiments.links.helper", request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us: we close the link after what used it
    )
    try:
        yield RemoteLink(process)
    finally:
        _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
