"""The deadline of an ordinary round, after which it counts as timed out. Does no I/O."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MIN_DEADLINE_S = 0.4
WINDOW = 64  # rounds
_MAX_EDGE_SHARE = 0.125  # of a deadline for the edge's own time: the rest is for the answer to arrive
_OUT_DECAY = 0.99  # a round, of the longest time that a token of the edge's own took


class RoundDeadline:
    """The larger of 400 ms and twice the 95th percentile of recent ordinary rounds (docs/design.md §6), each from the
    beginning of its draft to its answer.

    `fixed_s`, the user's own value, replaces the rule. Rounds that opened, rebuilt, recomputed or waited
    after a refusal are not ordinary and must not be observed. Until the first one is, the time given to
    `expect` counts: over a long round trip no round would otherwise be in time.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []  # the same, sorted
        self._expected_s = 0.0
        self._out_s = 0.0

    def expect(self, round_s: float) -> None:
        """Sets the upper bound of a round's time that is known before the first one."""
        self._expected_s = round_s

    def observe(self, round_s: float) -> None:
        """Adds an ordinary round."""
        if len(self._recent) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(round_s)
        insort(self._ordered, round_s)

    def observe_late(self, round_s: float) -> None:
        """Adds a round whose answer came after its deadline. Several of them mean that the link is slower now;
        a single one was an outage, so it counts for twice the deadline at most."""
        self.observe(min(round_s, 2.0 * self.seconds))

    def observe_out(self, seconds: float) -> None:
        """Adds the time that a token of the edge's own takes once the deadline has passed: that of applying
        an answer and of drafting a token."""
        self._out_s = max(seconds, _OUT_DECAY * self._out_s)

    @property
    def seconds(self) -> float:
        """Returns the deadline of a round, from the beginning of its draft to its answer."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._ordered:
            return max(MIN_DEADLINE_S, 2.0 * self._expected_s)
        number = len(self._ordered)
        p95 = self._ordered[min(number - 1, int(0.95 * number))]
        return max(MIN_DEADLINE_S, 2.0 * p95)

    def patience_s(self, drafted_s: float) -> float:
        """Returns how long to wait for the answer to a round whose draft took `drafted_s`, so that a token of
        the edge's own is out by the deadline."""
        deadline_s = self.seconds
        return deadline_s - min(drafted_s + self._out_s, _MAX_EDGE_SHARE * deadline_s)
