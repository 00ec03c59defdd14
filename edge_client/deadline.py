"""How long an ordinary round may take before it counts as timed out. Pure."""

from __future__ import annotations

from collections import deque

MIN_DEADLINE_S = 0.4
WINDOW = 64


class RoundDeadline:
    """The larger of 400 ms and twice the 95th percentile of recent ordinary rounds (DESIGN §6).

    `fixed_s` replaces the rule by the user's own value. Rounds that opened, rebuilt, recomputed or
    waited after a refusal are not ordinary and must not be observed. Until the first one is, `expect` says
    what to reckon with: a link of a long round trip would never see one in time.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._expected_s = 0.0

    def expect(self, round_s: float) -> None:
        """What a round may take at most, as far as anybody can tell before the first."""
        self._expected_s = round_s

    def observe(self, round_s: float) -> None:
        self._recent.append(round_s)

    def observe_late(self, round_s: float) -> None:
        """A round whose answer came after its deadline. Several of them mean that the link is slower now; a
        single one was an outage, so it counts for twice the deadline at most."""
        self.observe(min(round_s, 2.0 * self.seconds))

    @property
    def seconds(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._recent:
            return max(MIN_DEADLINE_S, 2.0 * self._expected_s)
        ordered = sorted(self._recent)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return max(MIN_DEADLINE_S, 2.0 * p95)
