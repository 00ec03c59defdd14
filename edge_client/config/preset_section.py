"""The section of the configuration about presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.common.config.loader import option

BIG_LITTLE = "big-little"
DEFAULT_FALLBACK, DEFAULT_ROLLBACK = 0.6, 3.0  # within the paper's: 0.5 to 0.9, and 1 to 6


@dataclass(frozen=True, slots=True)
class PresetConfig:
    """Configures presets."""

    name: Literal["none", "big-little"] = option(
        "none",
        "settings that go together; big-little is BiLD (approximate: not the target's distribution): the draft writes "
        "until it is unsure, the target replaces what it finds unlikely; sets --gate stop, --gate-nll and "
        "--method threshold",
        key="preset",
    )
    fallback: float | None = option(
        None,
        f"big-little: the draft asks the target where its probability is below P; none is {DEFAULT_FALLBACK:g}",
        metavar="P",
        minimum=1e-6,
        maximum=1.0,
        flag="--fallback-threshold",
        key="fallback_threshold",
    )
    rollback: float | None = option(
        None,
        f"big-little: the target replaces a token of more than X nats by its own probability; none is "
        f"{DEFAULT_ROLLBACK:g}",
        metavar="X",
        minimum=0.0,
        maximum=13.0,
        flag="--rollback-threshold",
        key="rollback_threshold",
    )
