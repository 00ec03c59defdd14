"""Times of rounds relative to the expected ones, learned round by round. Pure."""

from __future__ import annotations

from outrider.edge_client.controller.settings import SETTINGS


class TimeRatio:
    """Learns what rounds take relative to what is expected of them. Later rounds let both the earlier ones and the
    prior be forgotten, and rounds of another kind let it return to the prior: what was learned long ago rules nothing
    out.

    It is a ratio of sums: of answers that arrive together the first one came late by what the others came early.
    """

    def __init__(self, prior: float, weight_rounds: float) -> None:
        self._prior, self._full_weight = prior, weight_rounds
        self._prior_weight = weight_rounds
        self._num_rounds = self._measured_s = self._expected_s = 0.0

    def observe(self, measured_s: float, expected_s: float) -> None:
        """Adds a round."""
        self._forget()
        self._prior_weight *= SETTINGS.acceptance_memory_per_round
        self._num_rounds += 1
        self._measured_s += measured_s
        self._expected_s += expected_s

    def observe_other(self) -> None:
        """Notes a round of another kind."""
        self._forget()
        self._prior_weight += (1 - SETTINGS.acceptance_memory_per_round) * (
            self._full_weight - self._prior_weight
        )

    def _forget(self) -> None:
        memory = SETTINGS.acceptance_memory_per_round
        self._num_rounds *= memory
        self._measured_s *= memory
        self._expected_s *= memory

    def start_from(self, prior: float) -> None:
        """Begins with another prior."""
        self._prior = prior

    @property
    def has_observed(self) -> bool:
        """Returns whether a round was added, which is not forgotten yet."""
        return self._num_rounds > 0

    @property
    def value(self) -> float:
        """Returns the ratio."""
        if not self._expected_s:
            return self._prior
        ratio = self._measured_s / self._expected_s
        weight = self._prior_weight + self._num_rounds
        return (self._prior_weight * self._prior + self._num_rounds * ratio) / weight
