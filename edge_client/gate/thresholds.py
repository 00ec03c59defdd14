"""From which values of its signals on a drafted token is hard. Pure.

Entropy, margin and variance are functions of the draft's distribution alone: they are known before a token
is sampled. The negative log-likelihood is the sampled token's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.common.types import Signals


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """A token is hard where any signal passes its threshold; None: that signal is not looked at."""

    nll: float | None = None  # nats; hard above
    entropy: float | None = None  # bits; hard above
    margin: float | None = None  # probability of the first minus the second token; hard below
    variance: float | None = None  # nats², of the first token's ln p under dropout; hard above

    @property
    def names(self) -> tuple[str, ...]:
        """Of the signals that are looked at."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    def doubt_place(self, signals: Signals) -> bool:
        """Whether the place is hard, whatever token is sampled there. A draft that tells no variance is not
        doubted by it."""
        if self.entropy is not None and signals.entropy_bits > self.entropy:
            return True
        if self.margin is not None and signals.margin < self.margin:
            return True
        return self.variance is not None and signals.variance is not None and signals.variance > self.variance

    def doubt_token(self, signals: Signals) -> bool:
        """Whether the sampled token is hard."""
        return self.nll is not None and signals.nll > self.nll

    def hard(self, signals: Signals) -> bool:
        return self.doubt_place(signals) or self.doubt_token(signals)
