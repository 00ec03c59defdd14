"""The realisation inside the kernel: `tc netem` on both ends of a veth pair, where the kernel has it.

Shape and far end are those of `tun`, with the kernel's own queues instead of our relay. Many kernels, those
of small virtual machines and containers among them, come without sch_netem; then this one refuses.
"""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager

from outrider.experiments.links import namespaces
from outrider.experiments.links.base import OpenLink, packet_faults
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.remote import remote_link

_UNBOUNDED = 100_000  # packets
_PACKET_BYTES = 1500
_ETHERNET_BYTES = 14  # counted by the kernel, not by a profile


class Netem:
    """Makes links of `tc netem`."""

    name = "netem"

    def refusals(self, profile: LinkProfile) -> list[str]:
        """Returns the reasons why not, as `LinkRealisation.refusals`."""
        reasons = [*namespaces.refusals(), *kernel_refusals()]
        if profile.jitter_ms and profile.jitter_distribution != "uniform":
            reasons.append(
                f"jitter_distribution is {profile.jitter_distribution}, and netem's tables hold other shapes"
            )
        if profile.loss and profile.loss_burst != 1:
            reasons.append("loss_burst: netem's runs of losses do not end with a pause; take tun, or 1")
        if profile.up_trace or profile.down_trace:
            reasons.append("up_trace, down_trace: netem has constant rates only")
        reasons += packet_faults(profile)
        if profile.outages:
            reasons.append("outages: netem does not keep time")
        return reasons

    def open(self, profile: LinkProfile, upstream: str) -> AbstractContextManager[OpenLink]:
        """Opens the link in a helper process."""
        return remote_link(self.name, profile, upstream)


def netem_command(profile: LinkProfile, device: str, is_up: bool) -> list[str]:
    """Returns the `tc` command for one direction, which leaves through `device`."""
    mbit = profile.up_mbit if is_up else profile.down_mbit
    half_ms = profile.rtt_ms / 2
    command = ["tc", "qdisc", "add", "dev", device, "root", "netem"]
    command += ["limit", str(_limit_packets(profile, mbit))]
    if profile.jitter_ms:  # netem's is on both sides of its delay, ours from none to twice the mean
        command += ["delay", _ms(half_ms + profile.jitter_ms), _ms(profile.jitter_ms)]
    else:
        command += ["delay", _ms(half_ms)]
    if profile.loss:
        command += ["loss", "random", f"{profile.loss * 100:g}%"]
    if mbit:
        command += ["rate", f"{mbit * 1e6:.0f}bit", str(-_ETHERNET_BYTES)]
    elif profile.jitter_ms:
        command += ["rate", "100gbit"]  # only with a rate does it keep packets in order
    return command


def _limit_packets(profile: LinkProfile, mbit: float) -> int:
    """Returns netem's limit, which counts what waits and what is on its way together, in packets."""
    if not (mbit and profile.queue_kb):
        return _UNBOUNDED
    on_its_way = mbit * 1e6 / 8 * (profile.rtt_ms / 2 + profile.jitter_ms) / 1000
    return max(1, math.ceil((profile.queue_kb * 1000 + on_its_way) / _PACKET_BYTES))


def _ms(value: float) -> str:
    return f"{value * 1000:.0f}us"


@functools.cache
def kernel_refusals() -> tuple[str, ...]:
    """Returns the reasons why `tc netem` does not work here; empty: it does. Tried on a loopback that
    nobody uses."""
    if shutil.which("tc") is None:
        return ("the command `tc` (package iproute2) is not installed",)
    if namespaces.refusals():
        return ()  # said there
    done = subprocess.run(
        [sys.executable, "-m", "outrider.experiments.links.netem.realisation"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return (f"this kernel has no netem: {' '.join(done.stderr.split())[-200:]}",)
    return ()


def _try_netem() -> int:
    with namespaces.Namespace().entered():
        command = netem_command(LinkProfile(rtt_ms=2), "lo", True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(_try_netem())
