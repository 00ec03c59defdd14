"""Presets: names for settings that go together. `big-little` is BiLD.

Kim et al. 2023, "Speculative Decoding with Big Little Decoder" (2302.07863). The small model writes until its highest
probability falls below the fallback threshold; the large one then replaces the first token of which the negative
logarithm of its own probability is above the rollback threshold. Here: the stop gate with a threshold of NLL, and
method `threshold` by the target's probability alone. Greedy, the gate's rule is the paper's;
sampled, it is asked about the sampled token in place of the likeliest.
"""

from __future__ import annotations

import math

from outrider.common.config.loader import value_of, with_values
from outrider.common.errors import UsageError
from outrider.common.types import Method
from outrider.edge_client.config.preset_section import BIG_LITTLE, DEFAULT_FALLBACK, DEFAULT_ROLLBACK
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.gate.gate import GateUse

_NO_RATIO = 1e6  # by which `threshold` accepts nothing


def with_preset(config: RunConfig) -> RunConfig:
    """Returns the configuration with the settings that its preset stands for. Raises `UsageError` for one of them that
    was given another value, and for thresholds without the preset."""
    preset = config.preset
    if preset.name != BIG_LITTLE:
        for flag, given in (("fallback", preset.fallback), ("rollback", preset.rollback)):
            if given is not None:
                raise UsageError(f"--{flag}-threshold {given:g} goes with --preset {BIG_LITTLE}")
        return config
    fallback = DEFAULT_FALLBACK if preset.fallback is None else preset.fallback
    rollback = DEFAULT_ROLLBACK if preset.rollback is None else preset.rollback
    meant: dict[str, object] = {
        "gate": GateUse.STOP,
        "gate_nll": -math.log(fallback),
        "method": Method.THRESHOLD,
        "threshold_pass": math.exp(-rollback),
        "threshold_ratio": _NO_RATIO,
    }
    for key, value in meant.items():
        given = value_of(config, key)
        if given not in (None, GateUse.OFF, Method.COUPLED, value):
            raise UsageError(
                f"--{key.replace('_', '-')} {given} does not go with --preset {BIG_LITTLE}, which sets it"
            )
    return with_values(config, **meant)
