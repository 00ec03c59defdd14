"""Measures how well a sweep's realisation makes links of the sweep's own round trips, for its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.experiments.links.calibration.measure import RTTS_MS, short_calibration
from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.sweep.config.schema import DIRECT

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
