"""A TUN device: whole IP packets in and out of a file descriptor. It goes when the descriptor does."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from outrider.common.errors import UsageError

TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def open_tun(name: str) -> int:
    """Makes the device `name` in the calling thread's namespace; returns its descriptor, not blocking.

    Raises UsageError when the kernel has no TUN devices or does not let us have one.
    """
    try:
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        raise UsageError(f"no TUN device {name}: {error}") from error
    return descriptor
