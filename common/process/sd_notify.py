"""Notifies systemd of a service's state (sd_notify(3)): ready, stopping, alive.

Datagrams go to the socket in NOTIFY_SOCKET; where it is not set, nothing happens. NOTIFY_SOCKET and
WATCHDOG_USEC are systemd's interface to a process, no configuration of ours. The packages that do this are
either old or need a compiler.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_PER_S = 1e6


class Notifier:
    """Sends a service's state. `watchdog_s` is how often `alive` must be called; None: never."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._address = env.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(env) if self._address else None

    def ready(self, status: str = "") -> None:
        """Reports that the service has started."""
        self._say("READY=1", status)

    def stopping(self, status: str = "") -> None:
        """Reports that the service is shutting down."""
        self._say("STOPPING=1", status)

    def status(self, status: str) -> None:
        """Sets the line that `systemctl status` shows."""
        self._say(status=status)

    def alive(self) -> None:
        """Resets systemd's watchdog."""
        self._say("WATCHDOG=1")

    def _say(self, state: str = "", status: str = "") -> None:
        if not self._address:
            return
        lines = [line for line in (state, f"STATUS={status}" if status else "") if line]
        # "@" is how systemd writes the zero byte that an abstract name begins with.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                sender.sendto("\n".join(lines).encode(), address)
            except OSError:
                pass  # systemd is gone or was never there: a service goes on


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    if env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for another process
    usec = env.get("WATCHDOG_USEC", "")
    return int(usec) / _PER_S if usec.isdecimal() and int(usec) else None
