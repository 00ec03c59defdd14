"""A link in virtual time: order, rate, determinism, and each of its rules by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.experiments.links.packets import PacketPath, make_loss, make_random
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.links.profiles import NAMED, named_profile
from outrider.experiments.links.virtual import VirtualLink, wire_bytes

MESSAGES = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 20_000)), min_size=1, max_size=40
)  # seconds since the one before, bytes
PROFILES = st.builds(
    LinkProfile,
    rtt_ms=st.floats(0, 300),
    jitter_ms=st.floats(0, 30),
    jitter_distribution=st.sampled_from(("uniform", "exponential", "pareto")),
    loss=st.floats(0, 0.3),
    loss_burst=st.floats(1, 5),
    up_mbit=st.sampled_from((0.0, 0.5, 10.0)),
    queue_kb=st.sampled_from((0.0, 2.0, 64.0)),
    outages=st.sampled_from(((), (Outage(0.5, 1.0),), (Outage(0.0, 0.2), Outage(1.0, 3.0)))),
    seed=st.integers(0, 5),
)


def deliveries(profile: LinkProfile, messages: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """(sent, arrived) of each, s."""
    up, now_s, found = VirtualLink(profile).up, 0.0, []
    for gap_s, num_bytes in messages:
        now_s += gap_s
        found.append((now_s, up.deliver(now_s, num_bytes)))
    return found


def arrival_ms(now_s: float, num_bytes: int = 100, **fields: Any) -> float:
    return VirtualLink(LinkProfile(**fields)).up.deliver(now_s, num_bytes) * 1000


@settings(max_examples=150, deadline=None)
@given(PROFILES, MESSAGES)
def test_messages_keep_their_order_and_none_is_faster_than_the_link(
    profile: LinkProfile, messages: list[tuple[float, int]]
) -> None:
    found = deliveries(profile, messages)
    assert all(first[1] <= second[1] for first, second in pairwise(found))
    assert all(arrived_s >= sent_s + profile.rtt_ms / 2000 - 1e-9 for sent_s, arrived_s in found)


def test_the_share_of_packets_that_others_overtake_is_the_profiles() -> None:
    path = PacketPath(LinkProfile(rtt_ms=40, reorder=0.2), is_up=True)
    arrivals_s = [path.send(number / 1000, 100) or 0.0 for number in range(5000)]
    late = [arrival_s > 0.020 + number / 1000 + 1e-9 for number, arrival_s in enumerate(arrivals_s)]
    assert sum(late) / len(late) == pytest.approx(0.2, abs=0.02)
    assert arrivals_s != sorted(arrivals_s)


@settings(max_examples=150, deadline=None)
@given(PROFILES, MESSAGES)
def test_between_any_two_arrivals_no_more_bytes_come_than_the_rate_allows(
    profile: LinkProfile, messages: list[tuple[float, int]]
) -> None:
    quiet = profile.with_changes(jitter_ms=0.0, loss=0.0, outages=(), queue_kb=0.0, up_mbit=2.0)
    found = deliveries(quiet, messages)
    for first in range(len(messages)):
        sent = 0
        for last in range(first + 1, len(messages)):
            sent += wire_bytes(messages[last][1])
            assert sent * 8 <= (found[last][1] - found[first][1]) * 2e6 + 1e-3


@settings(max_examples=50, deadline=None)
@given(PROFILES, MESSAGES)
def test_the_same_seed_gives_the_same_times(profile: LinkProfile, messages: list[tuple[float, int]]) -> None:
    assert deliveries(profile, messages) == deliveries(profile, messages)


def test_links_with_other_keys_or_seeds_have_other_luck() -> None:
    profile = named_profile("4g")
    times = {
        VirtualLink(profile.with_changes(seed=seed), key).up.deliver(0.0, 100)
        for seed, key in ((0, ""), (1, ""), (0, "b"))
    }
    assert len(times) == 3


@pytest.mark.parametrize("distribution", ["uniform", "exponential", "pareto"])
def test_jitter_has_the_mean_that_the_profile_says(distribution: str) -> None:
    up = VirtualLink(LinkProfile(jitter_ms=5, jitter_distribution=distribution)).up
    waits = [up.deliver(second, 100) - second for second in map(float, range(20_000))]
    assert sum(waits) / len(waits) == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_the_share_of_lost_packets_is_the_profiles(burst: float) -> None:
    up = VirtualLink(LinkProfile(loss=0.05, loss_burst=burst)).up
    times = [number * 1000.0 for number in range(20_000)]  # none waits for another
    num_late = sum(up.deliver(time_s, 100) > time_s for time_s in times)
    assert num_late / len(times) == pytest.approx(0.05, rel=0.1)


def test_losses_come_in_runs_of_the_stated_length() -> None:
    profile = LinkProfile(loss=0.05, loss_burst=4)
    is_lost = make_loss(profile, make_random(profile, True))
    fates = [is_lost(number * 0.001) for number in range(100_000)]
    num_runs = sum(second and not first for first, second in pairwise(fates))
    assert sum(fates) / len(fates) == pytest.approx(0.05, rel=0.1)
    assert sum(fates) / num_runs == pytest.approx(4, rel=0.1)


def test_a_message_takes_its_bytes_and_headers_through_the_rate() -> None:
    # 2,000 bytes are two segments: 2,104 bytes on the wire, 16.832 ms at 1 Mbit/s, and 20 ms of propagation.
    assert arrival_ms(0, 2000, rtt_ms=40, up_mbit=1) == pytest.approx(36.832)


def test_a_lone_lost_segment_waits_for_the_probe_and_then_the_timer_which_doubles() -> None:
    up = VirtualLink(LinkProfile(rtt_ms=100, loss=0.6)).up
    waits_ms = {round((up.deliver(t, 100) - t) * 1000) for t in range(0, 100_000, 1000)}
    assert waits_ms >= {50, 50 + 300, 50 + 300 + 300, 50 + 300 + 300 + 600}
    assert not waits_ms & set(range(51, 350))


def test_what_is_sent_in_an_outage_comes_with_the_first_retransmission_after_it() -> None:
    # RTO 0.3 s: tried again 0.3, 0.6, 1.2, 2.4 s after 1.0; the outage ends at 3.0.
    link = VirtualLink(LinkProfile(rtt_ms=100, outages=(Outage(1, 2),)))
    assert link.up.deliver(0.9, 100) == pytest.approx(0.95)
    assert link.up.deliver(1.0, 100) == pytest.approx(3.4 + 0.05)
    # The next one, sent after the outage, waits for that retransmission's acknowledgement.
    assert link.up.deliver(3.05, 100) == pytest.approx(3.4 + 0.1 + 0.05)
    assert link.down.deliver(3.05, 100) == pytest.approx(3.1)


def test_a_fresh_connection_does_not_wait_for_the_old_ones_retransmission() -> None:
    link = VirtualLink(LinkProfile(rtt_ms=100, outages=(Outage(1, 4),)))
    assert link.up.deliver(1.0, 100) == pytest.approx(5.85)
    ready_s = link.connect(5.0)
    assert ready_s == pytest.approx(5.1)
    assert link.up.deliver(ready_s, 100) == pytest.approx(5.15)


@pytest.mark.parametrize("queue_kb", [0, 5])
def test_what_an_old_connection_holds_back_takes_no_capacity_from_a_fresh_one(queue_kb: float) -> None:
    # 1,500 bytes take 12 ms at 1 Mbit/s. Lost at 1.012, tried until 5.812: what follows waits until 5.912.
    old = VirtualLink(LinkProfile(rtt_ms=100, up_mbit=1, queue_kb=queue_kb, outages=(Outage(1, 4),)))
    assert old.up.deliver(1.0, 1448) == pytest.approx(5.862)
    assert [old.up.deliver(5.02, 1448) for _ in range(4)] == pytest.approx([5.974, 5.986, 5.998, 6.01])
    fresh = VirtualLink(old.profile, beside=old)
    assert fresh.up.deliver(5.1, 1448) == pytest.approx(5.162)
    assert old.up.deliver(6.2, 1448) == pytest.approx(6.262)


def test_a_handshake_in_an_outage_is_tried_again_every_second() -> None:
    link = VirtualLink(LinkProfile(rtt_ms=100, outages=(Outage(0.5, 2),)))
    assert link.connect(0.6) == pytest.approx(2.6 + 0.1)


def test_a_full_queue_costs_a_round_trip_and_no_capacity() -> None:
    link = VirtualLink(LinkProfile(rtt_ms=100, up_mbit=1, queue_kb=5))
    times = [link.up.deliver(0.0, 1448) for _ in range(5)]  # 12 ms each; three fit into the queue
    assert times == pytest.approx([0.062, 0.074, 0.086, 0.198, 0.210])


def test_two_connections_over_one_link_share_its_rate() -> None:
    first = VirtualLink(LinkProfile(up_mbit=1))
    second = VirtualLink(first.profile, beside=first)
    assert first.up.deliver(0, 1448) == pytest.approx(0.012)
    assert second.up.deliver(0, 1448) == pytest.approx(0.024)
    assert second.down.deliver(0, 1448) == 0


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_named_profile_delivers(name: str) -> None:
    profile = named_profile(name)
    link = VirtualLink(profile)
    assert link.up.deliver(0.0, 200) >= profile.rtt_ms / 2000
    assert link.down.deliver(0.0, 200) >= profile.rtt_ms / 2000
