"""`tc netem` as it would be called, and why it is not here."""

from __future__ import annotations

import pytest

from outrider.experiments.links.netem import realisation as netem
from outrider.experiments.links.netem.realisation import Netem, netem_command
from outrider.experiments.links.profile import LinkProfile, Outage


@pytest.mark.parametrize(
    ("profile", "is_up", "arguments"),
    [
        (LinkProfile(rtt_ms=40), True, "limit 100000 delay 20000us"),
        (LinkProfile(rtt_ms=41), False, "limit 100000 delay 20500us"),
        (LinkProfile(rtt_ms=10, loss=0.02), True, "limit 100000 delay 5000us loss random 2%"),
        (LinkProfile(rtt_ms=10, up_mbit=8), True, "limit 100000 delay 5000us rate 8000000bit -14"),
        (LinkProfile(rtt_ms=10, up_mbit=8), False, "limit 100000 delay 5000us"),
        # 30 kB queue and 8 Mbit/s for 20 ms on its way: 50 kB, 34 packets.
        (LinkProfile(rtt_ms=40, up_mbit=8, queue_kb=30), True, "limit 34 delay 20000us rate 8000000bit -14"),
        # From 20 to 26 ms: ours is 20 and 3 more in the mean; with a rate it keeps packets in order.
        (LinkProfile(rtt_ms=40, jitter_ms=3), True, "limit 100000 delay 23000us 3000us rate 100gbit"),
    ],
)
def test_a_direction_is_one_command(profile: LinkProfile, is_up: bool, arguments: str) -> None:
    expected = ["tc", "qdisc", "add", "dev", "veth0", "root", "netem", *arguments.split()]
    assert netem_command(profile, "veth0", is_up) == expected


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (LinkProfile(jitter_ms=1, jitter_distribution="pareto"), "jitter_distribution is pareto"),
        (LinkProfile(loss=0.1, loss_burst=3), "loss_burst"),
        (LinkProfile(up_trace="lte-walk-up.trace"), "constant rates only"),
        (LinkProfile(outages=(Outage(1, 1),)), "outages"),
        (LinkProfile(reorder=0.1), "reorder"),
        (LinkProfile(duplicate=0.1), "duplicate"),
    ],
)
def test_what_netem_cannot_do_is_refused_by_its_field(
    profile: LinkProfile, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netem, "kernel_refusals", lambda: ())
    monkeypatch.setattr(netem.namespaces, "refusals", lambda: ())
    refusals = Netem().refusals(profile)
    assert len(refusals) == 1 and reason in refusals[0]
    assert not Netem().refusals(LinkProfile(rtt_ms=40, jitter_ms=3, loss=0.01, up_mbit=5, queue_kb=30))


def test_a_kernel_without_netem_says_so() -> None:
    for reason in netem.kernel_refusals():
        assert "netem" in reason or "tc" in reason
