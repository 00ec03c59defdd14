"""The realisation without a socket: `VirtualLink`, for whoever keeps the time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from outrider.common.errors import UsageError
from outrider.experiments.links.base import OpenLink, packet_faults
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.virtual import VirtualLink


class Simulated:
    """Makes links in virtual time, which nothing can dial."""

    name = "simulated"

    def refusals(self, profile: LinkProfile) -> list[str]:
        """Returns no reason: every profile can be simulated but one of single packets' faults."""
        return packet_faults(profile)

    def link(self, profile: LinkProfile, key: str = "") -> VirtualLink:
        """Returns a link in virtual time."""
        return VirtualLink(profile, key)

    def open(self, profile: LinkProfile, upstream: str) -> AbstractContextManager[OpenLink]:
        """Raises `UsageError`: there is no address to dial."""
        raise UsageError("a simulated link has no address to dial; use proxy, tun or netem")
