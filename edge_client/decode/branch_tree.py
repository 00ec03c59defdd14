"""Where to draft next while rounds are under way: behind all of them, or behind a guess at a rejection. Pure.

With `coupled` the edge knows the noise: where a token of its draft falls, the verifier's is often the draft's
own runner-up, and falls are likely where the two scored nearly the same. So beside "all of it stands" there
are other texts worth drafting behind: the draft up to some token, and that token's runner-up instead of it.

    text   [ a b c d ]──[ e f g h ]──            what is under way if everything stands
                │  │       │
                │  └ d'    └ f' ──[ i j k l ]     a guess: e stands, f falls, the correction is f'
                └ c'

Each such branch has a chance that the verifier gets there, and the likeliest one is drafted next.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.common.types import RunnerUp

_EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # of gaps, nats
_PRIOR_FALLS = (0.63, 0.48, 0.37, 0.26, 0.06, 0.01, 0.002)  # by gap; the embedded pair's
_PRIOR_RIGHT = (0.33, 0.30, 0.24, 0.17, 0.035, 0.008, 0.001)  # fallen, and the runner-up is the target's
_PRIOR_WEIGHT = 8.0  # tokens
_MEMORY = 0.995  # weight a token keeps with every later one of its bin


class GuessRates:
    """By the gap between a drafted token and its runner-up: how often a token whose turn came fell, and how
    often its runner-up was the target's then."""

    def __init__(self) -> None:
        self._tried = [_PRIOR_WEIGHT] * (len(_EDGES) + 1)
        self._fallen = [_PRIOR_WEIGHT * rate for rate in _PRIOR_FALLS]
        self._right = [_PRIOR_WEIGHT * rate for rate in _PRIOR_RIGHT]

    def observe(self, runner_ups: Sequence[RunnerUp], num_accepted: int, correction: int) -> None:
        """Of a round of which `num_accepted` tokens stand, and then `correction`."""
        for number, each in enumerate(runner_ups[: num_accepted + 1]):
            has_fallen = number == num_accepted
            index = bisect(_EDGES, each.gap)
            self._tried[index] = _MEMORY * self._tried[index] + 1
            self._fallen[index] = _MEMORY * self._fallen[index] + has_fallen
            is_right = has_fallen and each.token_id == correction
            self._right[index] = _MEMORY * self._right[index] + is_right

    def stands(self, gap: float) -> float:
        index = bisect(_EDGES, gap)
        return 1 - self._fallen[index] / self._tried[index]

    def is_runner_up(self, gap: float) -> float:
        """The chance that the token falls and its runner-up is the target's."""
        index = bisect(_EDGES, gap)
        return self._right[index] / self._tried[index]


Host = TypeVar("Host")


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Generic[Host]):
    """Behind the first `place` tokens of `host`'s draft, and then `guess`; None: behind all of it."""

    host: Host
    place: int
    guess: int | None
    chance: float  # that the verifier gets there


class Branches(Generic[Host]):
    """The branches of the rounds under way that nothing was drafted behind yet."""

    def __init__(self, rates: GuessRates) -> None:
        self._rates = rates
        self._open: list[Branch[Host]] = []

    def best(self, is_allowed: Callable[[Branch[Host]], bool] | None = None) -> Branch[Host] | None:
        """The likeliest of those allowed."""
        allowed = self._open if is_allowed is None else filter(is_allowed, self._open)
        return max(allowed, key=lambda each: each.chance, default=None)

    def take(self, branch: Branch[Host]) -> None:
        self._open.remove(branch)

    def grow(
        self,
        host: Host,
        length: int,
        chance: float,
        runner_ups: Sequence[RunnerUp],
        before: tuple[Host, int] | None = None,
    ) -> None:
        """The branches of a new round of `length` tokens that is judged with `chance`. `before`: the round
        whose verdict judges its first token already, by the bonus, and the length of that one's draft."""
        for place, each in enumerate(runner_ups):
            where = before if place == 0 and before is not None else (host, place)
            self._open.append(Branch(*where, each.token_id, chance * self._rates.is_runner_up(each.gap)))
            chance *= self._rates.stands(each.gap)
        self._open.append(Branch(host, length, None, chance))

    def keep(self, is_kept: Callable[[Host], bool], chance: float = 1.0) -> None:
        """Those of hosts that are kept, given something that had `chance`."""
        self._open = [
            Branch(each.host, each.place, each.guess, min(1.0, each.chance / chance))
            for each in self._open
            if is_kept(each.host)
        ]
