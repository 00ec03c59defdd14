"""A profile that makes no sense is refused by field; YAML gives the profile that it says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from outrider.common.errors import UsageError
from outrider.experiments.links.base import REALISATIONS, check_realisable, create_realisation
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.links.profiles import NAMED, load_profile, named_profile


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rtt_ms": -1}, "rtt_ms is -1; give at least 0"),
        ({"rtt_ms": "fast"}, "rtt_ms is 'fast'"),
        ({"rtt_ms": float("nan")}, "rtt_ms is nan"),
        ({"up_mbit": float("inf")}, "up_mbit is inf"),
        ({"jitter_distribution": "normal"}, "one of uniform, exponential, pareto"),
        ({"loss": 1.0}, "loss is 1.0; give at least 0 and below 1"),
        ({"loss": 0.9, "loss_burst": 2.0}, "loss_burst is 2.0"),
        ({"reorder": 1.0}, "reorder is 1.0; give at least 0 and below 1"),
        ({"duplicate": -0.1}, "duplicate is -0.1; give at least 0 and below 1"),
        ({"queue_kb": 1.0}, "queue_kb is 1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"name": " "}, "name is ' '"),
        ({"up_mbit": 5.0, "up_trace": "lte-walk-up.trace"}, "up_trace is"),
        ({"outages": (Outage(5, 0),)}, "outages is"),
        ({"outages": (Outage(5, 2), Outage(6, 1))}, "outages is"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="link profile") as caught:
        LinkProfile(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("4gg", "did you mean 4g"),
        ({"base": "lann"}, "did you mean lan"),
        ({"rtt": 5}, "unknown field rtt; did you mean rtt_ms?"),
        ({"outages": 5}, "outages is 5; expected a list"),
        ({"outages": [{"start_s": 1}]}, "expected a list"),
        (17, "expected a profile's name"),
    ],
)
def test_what_yaml_may_get_wrong_is_told(source: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile(source)
    assert message in str(caught.value)


def test_a_mapping_starts_from_its_base_and_is_called_after_what_it_sets() -> None:
    profile = load_profile({"base": "4g", "loss": 0.02})
    assert profile == named_profile("4g").with_changes(name="4g+loss=0.02", loss=0.02)
    assert load_profile({"rtt_ms": 30}) == LinkProfile("rtt_ms=30", rtt_ms=30)
    profile = load_profile({"name": "mine", "outages": [{"start_s": 1, "duration_s": 2}]})
    assert profile.outages == (Outage(1, 2),)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_profile_survives_json_and_can_be_had_by_proxy(name: str) -> None:
    profile = named_profile(name)
    assert load_profile(asdict(profile)) == profile
    check_realisable(create_realisation("proxy"), profile)


def test_the_issues_names_are_all_there() -> None:
    wanted = "loopback lan wifi wifi-lossy metro 5g 4g cross-region cross-continent leo geo outage"
    assert list(NAMED) == wanted.split()


def test_a_realisation_refuses_what_it_cannot_do_with_every_reason() -> None:
    fast = LinkProfile("fast", up_mbit=10_000, down_mbit=10_000)
    with pytest.raises(UsageError, match=r"proxy cannot make the link fast: up_mbit is 10000.*down_mbit"):
        check_realisable(create_realisation("proxy"), fast)
    with pytest.raises(UsageError, match="did you mean proxy"):
        create_realisation("proxi")
    with pytest.raises(UsageError, match="no address to dial"):
        create_realisation("simulated").open(LinkProfile(), "127.0.0.1:1")
    assert REALISATIONS == ("simulated", "proxy", "tun", "netem")
