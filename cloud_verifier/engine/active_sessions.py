"""Counts the sessions that something was computed for lately: those whose next tokens are expected. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.cloud_verifier.engine.line import SessionKey

ACTIVE_FOR_S = 1.0  # after an answer; drafting and a round trip take less on all but the slowest


class Company(NamedTuple):
    """Tells how many sessions an answer's session shared what with, itself included; 0: it is not told."""

    num_in_step: int
    num_active: int


HIDDEN = Company(0, 0)


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
