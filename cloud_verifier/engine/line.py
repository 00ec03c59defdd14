"""The rounds that were refused for their wait and will come again, in the order of their first refusals.

A round that was refused keeps its place while it waits at its edge, so that one which comes for the first time
does not pass it, and each retry hint is the time until those before it have been served. Without places every
free slot goes to whoever asks next: many retries for one round, and some sessions without any.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from outrider.common.clock import Clock

MAX_PLACES = 4096  # rounds beyond are refused without a place
_LATE_S = 0.5  # for which a place is kept after its hint: a round trip, and a thread that wakes up late

SessionKey = tuple[str, bytes]
"""A tenant and a session's id."""


@dataclass(slots=True)
class _Place:
    num_tokens: int
    joined: int  # tokens of all that joined before it, gone or not
    own_joined: int  # the same, of its tenant
    until_s: float


class RefusedLine:
    """Holds the places by session. What is before a place is what joined before it less what has left, so it
    is a little low where others leave out of order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: OrderedDict[SessionKey, _Place] = OrderedDict()
        self._joined = self._left = 0
        self._own_joined: Counter[str] = Counter()
        self._own_left: Counter[str] = Counter()

    def before(self, key: SessionKey) -> tuple[int, int]:
        """Returns the tokens refused before this session's place, or before a new one: all, and the tenant's."""
        self._drop_late()
        place, tenant = self._places.get(key), key[0]
        joined, own = self._joined, self._own_joined.get(tenant, 0)
        if place is not None:
            joined, own = place.joined, place.own_joined
        return max(0, joined - self._left), max(0, own - self._own_left.get(tenant, 0))

    def join(self, key: SessionKey, num_tokens: int, retry_ms: int) -> None:
        """Takes a place at the end, or keeps the one that the session has, until after its next try."""
        until_s = self._clock.now() + retry_ms / 1e3 + _LATE_S
        if (place := self._places.get(key)) is not None:
            place.until_s = until_s
        elif len(self._places) < MAX_PLACES:
            self._places[key] = _Place(num_tokens, self._joined, self._own_joined[key[0]], until_s)
            self._joined += num_tokens
            self._own_joined[key[0]] += num_tokens

    def leave(self, key: SessionKey) -> None:
        """Gives up the session's place, if it has one."""
        if (place := self._places.pop(key, None)) is not None:
            self._left += place.num_tokens
            self._own_left[key[0]] += place.num_tokens
            if self._own_left[key[0]] == self._own_joined[key[0]]:  # nobody's place is counted from these
                del self._own_left[key[0]], self._own_joined[key[0]]

    def _drop_late(self) -> None:
        now_s = self._clock.now()
        while self._places and next(iter(self._places.values())).until_s < now_s:
            self.leave(next(iter(self._places)))
