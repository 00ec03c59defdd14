"""TUN devices and a namespace: real TCP over an emulated link, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.tcp_peers import check_echo, dialled, echo, fastest_s, tcp_server
from support.timed import timed

from outrider.experiments.links.calibration.echo import echo_server, round_trips_ms
from outrider.experiments.links.priority import real_time
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.links.remote import remote_link
from outrider.experiments.links.tun.realisation import Tun

TUN = Tun()
pytestmark = pytest.mark.net
DEVICES = Path("/sys/class/net")


@pytest.fixture(autouse=True)
def _needs_namespaces() -> Iterator[None]:
    if reasons := TUN.refusals(LinkProfile()):
        pytest.skip("; ".join(reasons))
    yield


@timed
def test_small_frames_take_the_profiles_round_trip(is_timed: bool) -> None:
    with real_time(), echo_server() as upstream, TUN.open(LinkProfile(rtt_ms=20), upstream) as link:
        for num_bytes in (200, 8000):
            times_ms, control = round_trips_ms(link.address, num_bytes, 12)
            assert min(times_ms) >= 20
            # Late by .7 ms in quiet, by 7 on a busy machine: how near a link comes, its calibration says.
            assert not is_timed or sorted(times_ms)[3] <= 30, "a frame waits for half a round trip, twice"
        assert link.facts()["congestion_control"] == control, "of the edge's own socket"


@timed
def test_a_connection_takes_its_own_round_trip(is_timed: bool) -> None:
    with real_time(), tcp_server(echo) as upstream, TUN.open(LinkProfile(rtt_ms=60), upstream) as link:
        took_s = fastest_s(lambda: dialled(link.address).close())
        assert 0.060 <= took_s and (not is_timed or took_s < 0.110)


def test_every_byte_arrives_though_packets_are_lost() -> None:
    profile = LinkProfile(rtt_ms=2, loss=0.01, loss_burst=2, queue_kb=64, up_mbit=100, down_mbit=100)
    with tcp_server(echo) as upstream, TUN.open(profile, upstream) as link, dialled(link.address) as client:
        check_echo(client, 600_000)
        facts = link.facts()
        assert facts["packets_dropped"]["up"] > 0
        up, _ = link.wire_bytes() or (0, 0)
        assert up > 600_000 * 1500 / 1448


def test_every_byte_arrives_though_packets_overtake_one_another() -> None:
    profile = LinkProfile(rtt_ms=8, reorder=0.2)
    with tcp_server(echo) as upstream, TUN.open(profile, upstream) as link, dialled(link.address) as client:
        check_echo(client, 200_000)
        assert link.facts()["packets_dropped"] == {"up": 0, "down": 0}


def test_every_byte_arrives_once_though_packets_come_twice() -> None:
    profile = LinkProfile(rtt_ms=8, duplicate=0.2)
    with tcp_server(echo) as upstream, TUN.open(profile, upstream) as link, dialled(link.address) as client:
        check_echo(client, 200_000)
        assert min(link.facts()["packets_duplicated"].values()) > 0


@timed
def test_an_outage_swallows_packets_and_tcp_sends_them_again(is_timed: bool) -> None:
    profile = LinkProfile(rtt_ms=10, outages=(Outage(0, 0.3),))
    with tcp_server(echo) as upstream, TUN.open(profile, upstream) as link:
        time.sleep(0.35)
        with dialled(link.address) as client:
            client.sendall(b"a")
            assert client.recv(1) == b"a"
            begin_s = time.perf_counter()
            link.restart_outages()
            client.sendall(b"b")
            assert client.recv(1) == b"b"
            assert 0.3 <= (took_s := time.perf_counter() - begin_s) and (not is_timed or took_s < 2)
        assert link.facts()["packets_dropped"]["up"] > 0


def test_a_reset_is_one() -> None:
    with tcp_server(echo) as upstream, TUN.open(LinkProfile(rtt_ms=2), upstream) as link:
        with dialled(link.address) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            assert link.reset() == 1
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_the_device_goes_with_the_link_even_when_its_helper_is_killed() -> None:
    with remote_link("tun", LinkProfile(), "127.0.0.1:9") as link:
        device = DEVICES / f"orl{link.process_id}"
        assert device.exists()
    assert not device.exists()
    with remote_link("tun", LinkProfile(), "127.0.0.1:9") as link:
        device = DEVICES / f"orl{link.process_id}"
        os.kill(link.process_id, signal.SIGKILL)
    assert not device.exists()
