"""Decides how long a step waits for sessions that will soon send a round, so that they share one step, and counts
those that are active. Pure.

Sessions that are answered together come back together, a draft and a round trip later. Where others were waiting
meanwhile, the next step begins without them, and from then on two halves of the sessions take turns: a cycle of
all takes twice a step's fixed time. A wait shorter than that time brings them together for good, as a disk that
waits for a reader's next request does (anticipatory scheduling, Iyer and Druschel 2001).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from outrider.cloud_verifier.engine.line import SessionKey
from outrider.common.step_time import LeastSquaresTime

MAX_WAIT_SHARE = 0.7  # of a step's fixed time: what a wait can spare at most is all of it
PAUSE_MEMORY = 0.8  # of a session's pauses, with each later one
NUM_DEVIATIONS = 2.0  # after its mean pause a session is awaited so long ...
SLACK_S = 0.0005  # ... and this
ACTIVE_FOR_S = 1.0  # after an answer; drafting and a round trip take less on all but the slowest
STEP_MEMORY = 0.998  # of steps' times: steps of one size, as equal sessions have, show no fixed time


@dataclass(slots=True)
class Pause:
    """Estimates how long one session takes from an answer to its next round, in seconds."""

    left_s: float = 0.0  # when it was answered; 0: it has a round here
    mean_s: float = 0.0
    deviation_s: float = 0.0
    is_known: bool = False

    def end(self, now_s: float) -> None:
        """Notes that a round arrived."""
        if not self.left_s:
            return
        pause_s, self.left_s = now_s - self.left_s, 0.0
        if self.is_known:
            self.deviation_s += (1 - PAUSE_MEMORY) * (abs(pause_s - self.mean_s) - self.deviation_s)
            self.mean_s += (1 - PAUSE_MEMORY) * (pause_s - self.mean_s)
        else:
            self.mean_s, self.deviation_s, self.is_known = pause_s, pause_s / 2, True

    @property
    def expected_s(self) -> float:
        """Returns by when it is back."""
        return self.left_s + self.mean_s + NUM_DEVIATIONS * self.deviation_s + SLACK_S


class Gathering:
    """Knows which sessions are expected back, and says how long a step that could begin waits for them."""

    def __init__(self) -> None:
        self._expected_s: dict[SessionKey, float] = {}
        self._times = LeastSquaresTime(STEP_MEMORY)
        self._since_s: float | None = None  # when the step that waits could have begun
        self.has_waited = False  # the step that has not begun yet

    def left(self, key: SessionKey, pause: Pause, now_s: float) -> None:
        """Notes that a session was answered, and that it has no other round here."""
        pause.left_s = now_s
        if pause.is_known:
            self._expected_s[key] = pause.expected_s

    def arrived(self, key: SessionKey) -> None:
        """Notes that a session has a request here, or is gone, at any time and from any thread."""
        self._expected_s.pop(key, None)

    def began(self) -> None:
        """Notes that a step begins."""
        self._since_s, self.has_waited = None, False

    def ended(self, num_tokens: int, step_s: float) -> None:
        """Adds the time of a step."""
        self._times.observe(num_tokens, step_s)

    def wait_s(self, now_s: float) -> float:
        """Returns how long the step that could begin waits; 0: it begins. Sessions that are late are not awaited."""
        if not self._times.is_sloped:
            return 0.0
        if self._since_s is None:
            self._since_s = now_s
        until_s, last_s = self._since_s + MAX_WAIT_SHARE * self._times.base_s, now_s
        for key, expected_s in list(self._expected_s.items()):
            if expected_s <= now_s:
                self._expected_s.pop(key, None)
            elif expected_s <= until_s:
                last_s = max(last_s, expected_s)
        self.has_waited = self.has_waited or last_s > now_s
        return last_s - now_s


class SessionCounts(NamedTuple):
    """Holds how many sessions an answer reports, its own included; 0: it does not."""

    num_in_step: int
    num_active: int


HIDDEN = SessionCounts(0, 0)


class ActiveSessions:
    """Knows when each session was answered last, the longest ago first."""

    def __init__(self) -> None:
        self._answered_s: dict[SessionKey, float] = {}

    def note(self, keys: Iterable[SessionKey], now_s: float) -> int:
        """Notes sessions that are answered now; returns how many are active."""
        answered_s = self._answered_s
        for key in keys:
            answered_s.pop(key, None)
            answered_s[key] = now_s
        while answered_s:
            oldest = next(iter(answered_s))
            if now_s - answered_s[oldest] <= ACTIVE_FOR_S:
                break
            del answered_s[oldest]
        return len(answered_s)

    def forget(self, key: SessionKey) -> None:
        """Notes that a session is gone."""
        self._answered_s.pop(key, None)
