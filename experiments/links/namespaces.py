"""A network namespace without a name, and the addresses of a link between it and ours.

The far end of a link lives in a namespace of its own, so that the kernel cannot take the short way to it. It
has no name and belongs to the helper process: when that ends, however it ends, the kernel removes it with all
its devices, and nothing is left to sweep up. Root (CAP_NET_ADMIN and CAP_SYS_ADMIN) is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.common.errors import UsageError

CLONE_NEWNET = 0x40000000
MTU = 1500
_KERNEL_QUEUE = "2000"  # packets, before a device; the queue of the profile is behind it
# For benchmarks of networks (RFC 2544): nobody routes it.
SUBNETS = ipaddress.IPv4Network("198.18.0.0/15")


class Namespace:
    """Holds a network namespace made by this process, which goes on running in its own."""

    def __init__(self) -> None:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _check(_libc().unshare(CLONE_NEWNET), "unshare")
        try:
            self._far = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _check(_libc().setns(self._home, CLONE_NEWNET), "setns")

    @property
    def path(self) -> str:
        """Returns the path for commands that ask for a namespace."""
        return f"/proc/{os.getpid()}/fd/{self._far}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the namespace: sockets, devices and processes made inside belong to it for good."""
        _check(_libc().setns(self._far, CLONE_NEWNET), "setns")
        try:
            yield
        finally:
            _check(_libc().setns(self._home, CLONE_NEWNET), "setns")

    def close(self) -> None:
        """Closes the namespace; its devices go with it."""
        os.close(self._far)
        os.close(self._home)


def free_addresses() -> tuple[str, str]:
    """Returns our address and the far one: two of SUBNETS that no device here has."""
    taken = ip("-4", "-o", "addr", "show")
    for number in range(1000):
        low = SUBNETS.network_address + 4 * ((os.getpid() + number) % (SUBNETS.num_addresses // 4))
        near, far = str(low + 1), str(low + 2)
        if f" {near}/" not in taken and f" {near} " not in taken:
            return near, far
    raise UsageError(f"no two addresses of {SUBNETS} are free for a link")


def set_up_device(device: str, own: str, peer: str, control: str) -> None:
    """Adds addresses, and a route that gives sockets their congestion control: the edge's are not
    ours."""
    ip("addr", "add", own, "peer", peer, "dev", device)
    ip("link", "set", device, "mtu", str(MTU), "txqueuelen", _KERNEL_QUEUE, "up")
    ip("route", "replace", peer, "dev", device, "src", own, "congctl", control)


def ip(*arguments: str) -> str:
    """Runs `ip ARGUMENTS` in the calling thread's namespace. Raises UsageError with what it said."""
    return run_tool("ip", *arguments)


def run_tool(*command: str) -> str:
    """Runs a command. Raises `UsageError` with what it printed where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise UsageError(f"{' '.join(command)}: {said or done.returncode}")
    return done.stdout


def listen_in(namespace: Namespace, address: tuple[str, int], congestion_control: str) -> socket.socket:
    """Opens a listening socket in the namespace; what it accepts takes the same congestion control."""
    with namespace.entered():
        listener = socket.create_server(address)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        return listener


def pick_congestion_control() -> str:
    """Returns cubic, which Linux ships with, wherever the kernel has it; else the machine's default."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    return "cubic" if "cubic" in known else known[0]


@functools.cache
def refusals() -> tuple[str, ...]:
    """Returns the reasons why this machine gives us no namespace; empty: it does."""
    if sys.platform != "linux":
        return (f"network namespaces are Linux's, this is {sys.platform}",)
    if shutil.which("ip") is None:
        return ("the command `ip` (package iproute2) is not installed",)
    if os.geteuid() != 0:
        return ("making network namespaces needs root",)
    # In a child: a process that may not, may have lost its own namespace on the way.
    tried = subprocess.run(
        [sys.executable, "-c", "from outrider.experiments.links.namespaces import Namespace; Namespace()"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        return (f"this process may not make a network namespace: {tried.stderr.strip().splitlines()[-1]}",)
    return ()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
