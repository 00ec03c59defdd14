"""`edge-client serve` as a real process, and what its system says about it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider.experiments.shared.processes import VerifierProcess, start_server

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class DaemonProcess:
    server: VerifierProcess
    config: Path | None = None

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def get(self, path: str, **headers: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
            is_json = response.headers["content-type"].startswith("application/json")
        return json.loads(content) if is_json else content

    def hang_up(self) -> None:
        self.server.process.send_signal(signal.SIGHUP)

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def num_threads(self) -> int:
        """But those of gRPC's own pool, which has one more for a while whenever all were busy."""
        names = [each.read_text().strip() for each in Path(f"/proc/{self.pid}/task").glob("*/comm")]
        return len(names) - names.count("event_engine")

    def num_requests(self) -> int:
        found = self.get("/v1/sessions")
        return int(found["running"] + found["waiting"])


@contextlib.contextmanager
def running_daemon(
    verifier: str, *arguments: str, config: Path | None = None, stderr: TextIO | None = None
) -> Iterator[DaemonProcess]:
    command = [sys.executable, "-m", "outrider.edge_client", "serve", "--verifier", verifier]
    command += ["--listen", "127.0.0.1:0", "--log-level", "error"]
    if config is not None:
        command += ["--config", str(config)]
    server = start_server([*command, *arguments], stderr=stderr)
    try:
        yield DaemonProcess(server, config)
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether it came true at last; the time is for machines that others are busy on."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def post_and_read_nothing(daemon: DaemonProcess, path: str, body: dict[str, object]) -> socket.socket:
    """A client with a small window that sends a request and then leaves the answer where it is."""
    host, _, port = daemon.address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {daemon.address}\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client
