"""The link of a visit: one of `outrider.experiments.links`, or none at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.links.base import OpenLink, check_realisable, create_realisation, kernel_facts
from outrider.experiments.links.calibration.measure import RTTS_MS, short_calibration
from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.links.traces import load_trace
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import DIRECT


@contextlib.contextmanager
def open_link(realisation: str, cell: Cell, upstream: str) -> Iterator[OpenLink | None]:
    """Opens the cell's link; yields None for a cell that sends nothing."""
    if not cell.has_link:
        yield None
    elif realisation == DIRECT:
        yield _DirectLink(upstream)
    else:
        with create_realisation(realisation).open(cell.link, upstream) as link:
            yield link


def check_links(realisation: str, profiles: Sequence[LinkProfile]) -> None:
    """Raises `UsageError` for a profile that this realisation cannot make, here, and for a trace that cannot
    be read."""
    if realisation != DIRECT:
        made = create_realisation(realisation)
        for profile in profiles:
            check_realisable(made, profile)
            for trace in filter(None, (profile.up_trace, profile.down_trace)):
                load_trace(trace)
        return
    for profile in profiles:
        if profile.rtt_ms or not profile.is_plain:
            raise UsageError(
                f"realisation: direct changes nothing about loopback, and the link {profile.name} asks for "
                "more; proxy needs no privileges"
            )


class _DirectLink:
    """Is an `OpenLink` without a link: the verifier's own address."""

    def __init__(self, upstream: str) -> None:
        self.address = upstream

    def facts(self) -> dict[str, Any]:
        return {"realisation": DIRECT, **kernel_facts()}

    def wire_bytes(self) -> tuple[int, int] | None:
        return None

    def restart_outages(self) -> None:
        """Does nothing: it has none."""

    def reset(self) -> int:
        return 0


_MOST = 3  # round trips
_LONGEST_MS = 200.0  # a longer one is made as this one is, and takes long to measure


def calibrate_links(realisation: str, profiles: Sequence[LinkProfile]) -> list[dict[str, Any]]:
    """Returns the points of a short calibration, as `calibration.measure` has them, with the kernel and
    the congestion control that they were measured under; none without a link."""
    if realisation == DIRECT:
        return []
    rtts_ms = sorted({p.rtt_ms for p in profiles if 0 < p.rtt_ms <= _LONGEST_MS})
    step = max(1, len(rtts_ms) // _MOST)
    record = short_calibration(realisation, rtts_ms[::step][:_MOST] or RTTS_MS[:1])
    facts = record["facts"].get(realisation, {})
    told = {name: facts[name] for name in ("kernel", "congestion_control") if name in facts}
    return [{**point, **told} for point in record["points"]]
