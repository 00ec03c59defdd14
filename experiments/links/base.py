"""One interface for every way to make a link real, and the ways there are.

realisation = create_realisation("proxy")
check_realisable(realisation, profile)             # raises UsageError with its reasons
with realisation.open(profile, "127.0.0.1:7077") as link:
    ... dial link.address ...
"""

from __future__ import annotations

import importlib
import platform
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import UsageError
from outrider.experiments.links.profile import LinkProfile

_REALISATIONS = {
    "simulated": ("outrider.experiments.links.simulated", "Simulated"),
    "proxy": ("outrider.experiments.links.proxy.realisation", "Proxy"),
    "tun": ("outrider.experiments.links.tun.realisation", "Tun"),
    "netem": ("outrider.experiments.links.netem.realisation", "Netem"),
}
REALISATIONS = tuple(_REALISATIONS)


class OpenLink(Protocol):
    """Is a link that is open. Its profile's outages count from its opening, or from `restart_outages`."""

    @property
    def address(self) -> str:
        """Returns the HOST:PORT that the edge dials, from this process's own network namespace."""

    def facts(self) -> dict[str, Any]:
        """Returns what a result should carry: realisation, kernel, congestion control, and what else
        matters."""

    def wire_bytes(self) -> tuple[int, int] | None:
        """Returns the IP bytes carried so far, up and down, headers and retransmissions included; None:
        not counted."""

    def restart_outages(self) -> None:
        """Lets the profile's outages count from now on."""

    def reset(self) -> int:
        """Breaks every connection with a TCP reset; returns how many. UsageError where it cannot."""


class LinkRealisation(Protocol):
    """Makes links of a profile in one way."""

    name: str

    def refusals(self, profile: LinkProfile) -> list[str]:
        """Returns the reasons why this profile cannot be had this way, here; empty: it can."""

    def open(self, profile: LinkProfile, upstream: str) -> AbstractContextManager[OpenLink]:
        """Connects `address` with `upstream`, HOST:PORT where the verifier listens. UsageError: refused."""


def create_realisation(name: str) -> LinkRealisation:
    """Raises UsageError with the nearest known name."""
    if name not in _REALISATIONS:
        hint = did_you_mean(name, _REALISATIONS)
        raise UsageError(f"no realisation of links is called {name!r}{hint} Known: {', '.join(REALISATIONS)}")
    module, kind = _REALISATIONS[name]
    made: LinkRealisation = getattr(importlib.import_module(module), kind)()
    return made


def check_realisable(realisation: LinkRealisation, profile: LinkProfile) -> None:
    """Raises UsageError with every reason why not."""
    if reasons := realisation.refusals(profile):
        raise UsageError(f"{realisation.name} cannot make the link {profile.name}: {'; '.join(reasons)}")


def packet_faults(profile: LinkProfile) -> list[str]:
    """Returns what the profile asks of single packets, each a reason to refuse it for all but `tun`."""
    asked = {"reorder": profile.reorder, "duplicate": profile.duplicate}
    return [
        f"{name}: packets overtake one another or come twice on tun alone" for name in asked if asked[name]
    ]


def kernel_facts() -> dict[str, str]:
    """Returns the kernel, and the congestion control that its TCP takes when nobody chooses."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    default = control.read_text(encoding="ascii").strip() if control.exists() else "unknown"
    return {"kernel": f"{platform.system()} {platform.release()}", "congestion_control": default}
