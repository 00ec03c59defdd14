"""The realisation with real TCP: two network namespaces joined by TUN devices, and a relay of IP packets.

    this namespace            helper process                    a namespace without a name
    edge, 198.18.x.1 ══ TUN ═▶ delay, loss, queue, rate ═▶ TUN ══ 198.18.x.2, relay ── verifier, here

The kernel's TCP runs over the link from end to end of it, with slow start, loss, retransmission and
congestion control; both sides stay in the namespace they were started in. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import AbstractContextManager
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.experiments.links import namespaces
from outrider.experiments.links.base import OpenLink
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.remote import remote_link

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


# One connection filled 96 % of 200 and 95 % of 300, on 2 shared cores; above, the relay's work shows.
MAX_MBIT = 200.0


class Tun:
    """Makes links of two TUN devices."""

    name = "tun"

    def refusals(self, profile: LinkProfile) -> list[str]:
        """Returns the reasons why not, as `LinkRealisation.refusals`."""
        reasons = list(namespaces.refusals())
        if not TUN.exists():
            reasons.append(f"{TUN} is missing: the kernel or this container has no TUN devices")
        for field, rate in (("up_mbit", profile.up_mbit), ("down_mbit", profile.down_mbit)):
            if rate > MAX_MBIT:
                reasons.append(f"{field} is {rate:g}, and the packet relay keeps up with {MAX_MBIT:g}")
        return reasons

    def open(self, profile: LinkProfile, upstream: str) -> AbstractContextManager[OpenLink]:
        """Opens the link in a helper process."""
        return remote_link(self.name, profile, upstream)
