"""The realisation that needs no privileges: a TCP proxy on loopback, which holds bytes back.

Two TCP connections on loopback with `VirtualLink` between them: what it says of a message in virtual time,
the proxy does with a chunk of bytes. So TCP itself sees no delay, no loss and no slow start.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from outrider.experiments.links.base import OpenLink, packet_faults
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.remote import remote_link

# At 1,000 it carried all of it, on 2 shared cores; at 2,000 half: its own work was the link.
MAX_MBIT = 1000.0


class Proxy:
    """Makes links of a TCP proxy."""

    name = "proxy"

    def refusals(self, profile: LinkProfile) -> list[str]:
        """Returns the reasons why not, as `LinkRealisation.refusals`."""
        reasons = [
            f"{field} is {rate:g}, and the proxy keeps up with {MAX_MBIT:g} at most; 0 does not limit"
            for field, rate in (("up_mbit", profile.up_mbit), ("down_mbit", profile.down_mbit))
            if rate > MAX_MBIT
        ]
        return reasons + packet_faults(profile)

    def open(self, profile: LinkProfile, upstream: str) -> AbstractContextManager[OpenLink]:
        """Opens the link in a helper process."""
        return remote_link(self.name, profile, upstream)
