"""Named links, and links from YAML.

What the figures stand for is in docs/links.md with its sources. They are round numbers of the size that was
published or follows from distance, for comparing designs; none is a promise about anybody's network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import UsageError
from outrider.experiments.links.profile import LinkProfile, Outage

__all__ = ["NAMED", "LinkProfile", "Outage", "load_profile", "named_profile"]

_PROFILES = (
    # No delay of its own: what the machine's loopback takes.
    LinkProfile("loopback"),
    # Two machines on one switch. A gigabit passes 10 KB in 0.08 ms: no limit to frames of our size.
    LinkProfile("lan", rtt_ms=0.5, jitter_ms=0.02),
    # One quiet access point, then the same building: contention adds a few ms now and then, losses are
    # repaired by the radio's own retransmissions.
    LinkProfile("wifi", rtt_ms=4, jitter_ms=1, jitter_distribution="exponential",
                up_mbit=100, down_mbit=100, queue_kb=256),
    # A crowded or distant access point: a heavy tail of delays, and runs of losses that the radio gave up on.
    LinkProfile("wifi-lossy", rtt_ms=8, jitter_ms=4, jitter_distribution="pareto", loss=0.02, loss_burst=3,
                up_mbit=20, down_mbit=20, queue_kb=256),
    # Fibre at home, the cloud in the same city or country.
    LinkProfile("metro", rtt_ms=12, jitter_ms=0.3, jitter_distribution="exponential",
                up_mbit=50, down_mbit=200, queue_kb=512),
    # Medians of crowd-sourced tests: about 30 Mbit/s up and 200 down (Cellsmart 2022: 31 and 242), 25-40 ms.
    LinkProfile("5g", rtt_ms=30, jitter_ms=3, jitter_distribution="exponential", loss=0.0005, loss_burst=2,
                up_mbit=30, down_mbit=200, queue_kb=1000),
    # As above for LTE: 8-12 Mbit/s up, 30-40 down, 45-55 ms.
    LinkProfile("4g", rtt_ms=50, jitter_ms=6, jitter_distribution="exponential", loss=0.001, loss_burst=2,
                up_mbit=10, down_mbit=35, queue_kb=1000),
    # Two data centres of one continent: Virginia - California is 60-73 ms.
    LinkProfile("cross-region", rtt_ms=70, jitter_ms=0.2),
    # Two continents: California - Frankfurt 150-167 ms, Virginia - Tokyo 145-165.
    LinkProfile("cross-continent", rtt_ms=160, jitter_ms=0.5),
    # Starlink: median 50 ms in Europe, 40-60 in the middle half, 10-20 Mbit/s up, 100-200 down; losses come
    # in runs when dish and satellite are paired anew.
    LinkProfile("leo", rtt_ms=50, jitter_ms=6, jitter_distribution="exponential", loss=0.004, loss_burst=6,
                up_mbit=15, down_mbit=150, queue_kb=1000),
    # Four times 35,786 km at the speed of light is 477 ms; coding and scheduling bring it to about 600.
    LinkProfile("geo", rtt_ms=600, jitter_ms=10, jitter_distribution="exponential", loss=0.001,
                up_mbit=5, down_mbit=50, queue_kb=2000),
    # A mobile link that is gone for five seconds, as in a lift or a tunnel.
    LinkProfile("outage", rtt_ms=50, outages=(Outage(5, 5),)),
)  # fmt: skip
NAMED: Mapping[str, LinkProfile] = {profile.name: profile for profile in _PROFILES}


def named_profile(name: str) -> LinkProfile:
    """Raises UsageError with the nearest known name."""
    if name not in NAMED:
        hint = did_you_mean(name, NAMED)
        raise UsageError(f"no link profile is called {name!r}{hint} Known: {', '.join(NAMED)}")
    return NAMED[name]


def load_profile(source: str | Mapping[str, Any] | LinkProfile) -> LinkProfile:
    """Returns a profile from its name or from a mapping of fields, as YAML gives it.

    `base: 4g` in a mapping starts from that named profile. A mapping without `name` is called after what it
    sets: `{rtt_ms: 30}` is "rtt_ms=30". `outages` is a list of `{start_s: ..., duration_s: ...}`. Raises
    UsageError naming the field.
    """
    if isinstance(source, LinkProfile):
        return source
    if isinstance(source, str):
        return named_profile(source)
    if not isinstance(source, Mapping):
        raise UsageError(f"link: expected a profile's name or its fields, not {source!r}")
    fields = dict(source)
    base = fields.pop("base", None)
    start = LinkProfile() if base is None else named_profile(str(base))
    for name in fields:
        if name not in _FIELDS:
            raise UsageError(f"link: unknown field {name}{did_you_mean(str(name), (*_FIELDS, 'base'))}")
    if "name" not in fields:
        told = [f"{name}={value}" for name, value in fields.items() if not isinstance(value, list)]
        told += ["outages"] if fields.get("outages") else []
        fields["name"] = "+".join(([start.name] if base is not None or not told else []) + told)
    if "outages" in fields:
        fields["outages"] = _outages(fields["outages"])
    return start.with_changes(**fields)


_FIELDS = tuple(field.name for field in dataclasses.fields(LinkProfile))


def _outages(value: object) -> tuple[Outage, ...]:
    try:
        items: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
        return tuple(each if isinstance(each, Outage) else Outage(**each) for each in items)
    except TypeError as error:
        wanted = "a list, each item {start_s: 5, duration_s: 5}"
        raise UsageError(f"link: outages is {value!r}; expected {wanted}") from error
