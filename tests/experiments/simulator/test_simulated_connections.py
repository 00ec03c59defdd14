"""Connections that share one edge's link: making one takes its trips and holds up no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.common.errors import LinkError
from outrider.edge_client.config.run_config import RunConfig
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.simulator.parts.network import SETTINGS_BYTES, Network, Site
from outrider.experiments.simulator.parts.times import EdgeTimes
from outrider.experiments.simulator.world.world import World

PROFILE = LinkProfile(rtt_ms=100, up_mbit=8, down_mbit=8)
VERIFIER: Any = SimpleNamespace(receive_s=0.0, send_s=0.0, open_stream=lambda session_id, deliver: None)


def made_link(world: World, site: Site) -> Any:
    network = Network(world)
    return network.create_link(RunConfig(verifier=network.add(site)), b"")


def test_a_connection_that_is_made_does_not_hold_up_what_others_send() -> None:
    world, site = World(), Site(0, PROFILE, EdgeTimes(), [VERIFIER])
    link, arrivals, ready_s = made_link(world, site), [], []

    def connect() -> None:
        link.connect(5.0)
        ready_s.append(world.now_s)

    def send() -> None:
        world.sleep(0.01)
        arrivals.append(site.link.up.deliver(world.now_s, 948))  # 1,000 bytes with headers: 1 ms

    world.start(connect)
    world.start(send)
    world.run()
    assert arrivals == [pytest.approx(0.01 + 0.001 + 0.05)]
    settings_s = (SETTINGS_BYTES + 52) * 1e-6
    assert ready_s == [pytest.approx(0.1 + 2 * (0.05 + settings_s))]


@pytest.mark.parametrize("timeout_s", [0.05, 0.12, 0.18])
def test_a_connection_that_takes_too_long_is_given_up_in_time(timeout_s: float) -> None:
    world, site = World(), Site(0, PROFILE, EdgeTimes(), [VERIFIER])
    link, given_up_s = made_link(world, site), []

    def connect() -> None:
        with pytest.raises(LinkError, match="no answer in"):
            link.connect(timeout_s)
        given_up_s.append(world.now_s)

    world.start(connect)
    world.run()
    assert given_up_s == [pytest.approx(timeout_s)]
