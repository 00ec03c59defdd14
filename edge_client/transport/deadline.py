"""How long an ordinary round may take before it counts as timed out. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MIN_DEADLINE_S = 0.4
WINDOW = 64
_MOST_OF_OURS = 0.125  # of a deadline: an answer must have had time to come, however long was drafted
_OUT_MEMORY = 0.99  # of the most that tokens took, for every later round


class RoundDeadline:
    """The larger of 400 ms and twice the 95th percentile of recent ordinary rounds (DESIGN §6), each from the
    beginning of its draft to its answer.

    `fixed_s` replaces the rule by the user's own value. Rounds that opened, rebuilt, recomputed or
    waited after a refusal are not ordinary and must not be observed. Until the first one is, `expect` says
    what to reckon with: a link of a long round trip would never see one in time.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []  # the same, sorted
        self._expected_s = 0.0
        self._out_s = 0.0

    def expect(self, round_s: float) -> None:
        """What a round may take at most, as far as anybody can tell before the first."""
        self._expected_s = round_s

    def observe(self, round_s: float) -> None:
        if len(self._recent) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(round_s)
        insort(self._ordered, round_s)

    def observe_late(self, round_s: float) -> None:
        """A round whose answer came after its deadline. Several of them mean that the link is slower now; a
        single one was an outage, so it counts for twice the deadline at most."""
        self.observe(min(round_s, 2.0 * self.seconds))

    def observe_out(self, seconds: float) -> None:
        """What a token of the edge's own takes once nothing is waited for: as long as an answer's tokens and
        drafting one do."""
        self._out_s = max(seconds, _OUT_MEMORY * self._out_s)

    @property
    def seconds(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._ordered:
            return max(MIN_DEADLINE_S, 2.0 * self._expected_s)
        number = len(self._ordered)
        p95 = self._ordered[min(number - 1, int(0.95 * number))]
        return max(MIN_DEADLINE_S, 2.0 * p95)

    def patience_s(self, drafted_s: float) -> float:
        """How long the answer to a round that was drafted for `drafted_s` is waited for, so that a token of
        the edge's own is out by the deadline."""
        deadline_s = self.seconds
        return deadline_s - min(drafted_s + self._out_s, _MOST_OF_OURS * deadline_s)
