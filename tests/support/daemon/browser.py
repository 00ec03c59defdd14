"""Headless Chromium over its debugging pipe: JSON messages on two file descriptors, no further package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    "--remote-debugging-pipe",
)
# The browser looks for its pipe at 3 and 4. Not in a `preexec_fn`: threads of gRPC run in this process.
_PLACE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded")


@dataclass
class Browser:
    """One page. `trouble` are the errors that its scripts, its network and its own policy made."""

    commands: BinaryIO
    answers: BinaryIO
    session_id: str = ""
    trouble: list[Any] = field(default_factory=list)
    _last_id: int = 0

    def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol. `AssertionError`: the browser says no, or is gone."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self.session_id:
            message["sessionId"] = self.session_id
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = self._next()
            if answer.get("method") in _TROUBLE:
                self.trouble.append(answer["params"])
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str, width: int, height: int) -> None:
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """What the expression, or the promise that it is, comes to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until the expression holds; the test's own time limit is the only one."""
        look = f"const look = () => {{ if ({condition}) done(true); else setTimeout(look, 10); }}; look();"
        assert self.run(f"new Promise((done) => {{ {look} }})")

    def _next(self) -> Any:
        content = bytearray()
        while (byte := self.answers.read(1)) not in (b"\0", b""):
            content += byte
        assert content, "the browser has gone"
        return json.loads(content)


@contextlib.contextmanager
def running_browser(directory: Path) -> Iterator[Browser]:
    """`directory` is for its profile."""
    assert CHROMIUM is not None
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    ours = (str(from_us), str(to_us))
    command = [sys.executable, "-c", _PLACE, *ours, CHROMIUM, *_FLAGS, f"--user-data-dir={directory}"]
    process = subprocess.Popen(command, pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(to_us)
    with open(to_browser, "wb") as commands, open(from_browser, "rb") as answers:
        browser = Browser(commands, answers)
        try:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            browser.session_id = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                browser.call(f"{domain}.enable")
            yield browser
        finally:
            process.kill()
            process.wait()
