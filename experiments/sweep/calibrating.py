"""The links of a sweep measured against what their profiles say, for its manifest."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from experiments.links.profiles import LinkProfile
from experiments.sweep.linking import DIRECT


def calibrate_links(realisation: str, profiles: Sequence[LinkProfile]) -> list[dict[str, Any]]:
    """One record a profile, as `experiments.links.calibrate` makes them; nothing for no link at all."""
    if realisation == DIRECT:
        return []
    calibrate = importlib.import_module("experiments.links.calibrate")
    return [calibrate.calibrate(realisation, profile) for profile in profiles]
