"""Draft one token more or less where the acceptance rate of the last rounds leaves a range."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.core.stats import RoundRecord


class SteppedDepth(FixedDepth):
    """Moves the length by at most one a round, from `start` within MIN_DEPTH to MAX_DEPTH."""

    def __init__(self, start: int, num_rounds: int) -> None:
        super().__init__(start)
        self._rounds: deque[tuple[int, int]] = deque(maxlen=num_rounds)  # accepted, drafted

    def observe(self, record: RoundRecord) -> None:
        """See `DepthPolicy.observe`."""
        if not record.is_answered or not record.num_draft_tokens:
            return  # has no acceptance rate
        self._rounds.append(record.as_chain)
        rate = sum(accepted for accepted, _ in self._rounds) / sum(drafted for _, drafted in self._rounds)
        depth = self._num_speculative_tokens + self._step(rate)
        self._num_speculative_tokens = min(max(depth, self.MIN_DEPTH), self.MAX_DEPTH)

    @abstractmethod
    def _step(self, rate: float) -> int: ...


class RatioDepth(SteppedDepth):
    """Moves the length by the last round's acceptance rate."""

    MIN_DEPTH, MAX_DEPTH = 3, 12

    def __init__(self, start: int = 6) -> None:
        super().__init__(start, num_rounds=1)

    def _step(self, rate: float) -> int:
        return (rate >= 0.8) - (rate <= 0.4)


class WindowDepth(SteppedDepth):
    """Keeps the acceptance rate over ten rounds within a tenth of 0.7."""

    MIN_DEPTH, MAX_DEPTH = 2, 8

    def __init__(self, start: int = 4) -> None:
        super().__init__(start, num_rounds=10)

    def _step(self, rate: float) -> int:
        return (rate > 0.8) - (rate < 0.6)
