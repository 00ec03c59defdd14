"""The draft length by the mean acceptance rate of the last ten rounds."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from outrider.common.errors import ConfigError
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import ShouldStop

WINDOW = 10  # acceptance rates that the mean is of
MARGIN = 0.1  # of the mean, above and below the target, within which the depth stays


class AdaptiveDepthAdjuster:
    """Moves a draft length by one where the mean of the last ten acceptance rates leaves `target_rate` ± 0.1.

    Raises `ConfigError` for a rate outside 0 to 1 and for depths that are no range.
    """

    def __init__(
        self, target_rate: float = 0.7, min_depth: int = 2, max_depth: int = 8, *, depth: int | None = None
    ) -> None:
        """`depth` is the first one, `min_depth` where it is not given."""
        if not 0.0 <= target_rate <= 1.0:
            raise ConfigError(f"target_rate is {target_rate}", "want a rate from 0 to 1")
        if not 1 <= min_depth <= max_depth:
            raise ConfigError(f"depths are {min_depth} to {max_depth}", "want at least 1, the smaller first")
        self.target_rate, self.min_depth, self.max_depth = target_rate, min_depth, max_depth
        self.depth = min(max(min_depth if depth is None else depth, min_depth), max_depth)
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def update(self, acceptance_rate: float) -> int:
        """Adds the acceptance rate of a round, 0 to 1; returns the depth from now on. Raises `ConfigError` for another
        number."""
        if not 0.0 <= acceptance_rate <= 1.0:
            raise ConfigError(f"acceptance_rate is {acceptance_rate}", "want a rate from 0 to 1")
        self._rates.append(acceptance_rate)
        difference = fmean(self._rates) - self.target_rate
        step = (difference > MARGIN) - (difference < -MARGIN)
        self.depth = min(max(self.depth + step, self.min_depth), self.max_depth)
        return self.depth


class AdjustedDepth:
    """Implements `DepthPolicy` by an adjuster, which outlives the generations that it is given to."""

    def __init__(self, adjuster: AdaptiveDepthAdjuster) -> None:
        self._adjuster = adjuster

    def next_depth(self, num_assumed: int = 0) -> int:
        """See `DepthPolicy.next_depth`."""
        return self._adjuster.depth

    def stop_rule(self) -> ShouldStop | None:
        """See `DepthPolicy.stop_rule`."""
        return None

    def observe(self, record: RoundRecord) -> None:
        """See `DepthPolicy.observe`."""
        accepted, drafted = record.as_chain
        if record.is_answered and drafted:
            self._adjuster.update(accepted / drafted)
