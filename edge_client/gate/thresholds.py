"""Compares a token's signals with thresholds.

Entropy, margin and variance are functions of the draft's distribution alone: they are known before a token is
sampled. The negative log-likelihood is the sampled token's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.common.types import Signals


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """Holds the thresholds. A token is hard where any signal passes its own; a signal whose threshold is None
    is not looked at."""

    nll: float | None = None  # nats; hard above
    entropy: float | None = None  # bits; hard above
    margin: float | None = None  # probability of the first minus the second token; hard below
    variance: float | None = None  # nats², of the first token's ln p under dropout; hard above

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the signals that have a threshold."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    def is_position_hard(self, signals: Signals) -> bool:
        """Returns whether the position is hard, whatever token is sampled there. A draft that measures no
        variance is never hard by it."""
        if self.entropy is not None and signals.entropy_bits > self.entropy:
            return True
        if self.margin is not None and signals.margin < self.margin:
            return True
        return self.variance is not None and signals.variance is not None and signals.variance > self.variance

    def is_token_hard(self, signals: Signals) -> bool:
        """Returns whether the sampled token is hard."""
        return self.nll is not None and signals.nll > self.nll

    def is_hard(self, signals: Signals) -> bool:
        """Returns whether the position or the token is hard."""
        return self.is_position_hard(signals) or self.is_token_hard(signals)
