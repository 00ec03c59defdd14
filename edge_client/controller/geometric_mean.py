"""The mean of measured : expected times, learned round by round. Pure."""

from __future__ import annotations

import math

from outrider.edge_client.controller.settings import SETTINGS


class GeometricMean:
    """Learns the geometric mean of ratios. Later rounds let both the earlier ones and the prior be forgotten."""

    def __init__(self, prior: float, weight_rounds: float) -> None:
        self._logs, self._num_rounds = weight_rounds * math.log(prior), weight_rounds

    def observe(self, ratio: float) -> None:
        """Adds a round's ratio, above 0."""
        memory = SETTINGS.acceptance_memory_per_round
        self._logs = memory * self._logs + math.log(ratio)
        self._num_rounds = memory * self._num_rounds + 1

    @property
    def value(self) -> float:
        """Returns the mean."""
        return math.exp(self._logs / self._num_rounds)
