"""Schedules over a budget, of time or of tokens: a run on time ends when it was asked to, on any machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Describes a phase from `start` (share of the budget) on: batches of `rows` windows of `length`
    tokens, `num_layers` deep (0: as deep as the model is). `functions` is the share of the batches that
    are whole functions with docstrings in place of the corpus, where a training has such."""

    start: float
    length: int
    rows: int
    num_layers: int = 0
    functions: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Warms up, stays on a plateau, then decays linearly to `final` at the end of the budget (Hu et al.
    2024, section 4)."""

    warmup: float = 0.02
    decay_start: float = 0.6
    final: float = 0.02

    def scale(self, done: float) -> float:
        """Returns the learning-rate factor after the share `done` (0 to 1) of the budget."""
        if done < self.warmup:
            return max(0.05, done / self.warmup)
        if done < self.decay_start:
            return 1.0
        left = max(0.0, 1.0 - done) / (1.0 - self.decay_start)
        return max(self.final, left)


def phase_at(phases: tuple[Phase, ...], done: float) -> Phase:
    """Returns the last phase that has begun."""
    return [phase for phase in phases if phase.start <= done or phase is phases[0]][-1]
