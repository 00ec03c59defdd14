"""The places to draft from while rounds are in flight: after all of them, or after a predicted correction.

With `coupled` the edge knows the noise: where a token of its draft is rejected, the correction is often the
draft's own runner-up, and rejections are likely where the two scored nearly the same. So besides the sequence
in which every draft is accepted there are others worth drafting after: the draft up to some token, and that
token's runner-up instead of it.

    text   [ a b c d ]──[ e f g h ]──            in flight, if all of it is accepted
                │  │       │
                │  └ d'    └ f' ──[ i j k l ]     a speculative branch: e accepted, f rejected, f' its correction
                └ c'

Each branch has a probability that the verifier's sequence takes it; the likeliest is drafted next. Does no
I/O.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.common.types import RunnerUp

_GAP_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # nats: the bins of gaps
# The rates of the embedded pair in each bin: of rejections, and of those whose correction is the runner-up.
_PRIOR_REJECTED = (0.63, 0.48, 0.37, 0.26, 0.06, 0.01, 0.002)
_PRIOR_CORRECT = (0.33, 0.30, 0.24, 0.17, 0.035, 0.008, 0.001)
_PRIOR_WEIGHT = 8.0  # tokens
_DECAY = 0.995  # of a token's weight with every later one of its bin


class RejectionRates:
    """Estimates, by the gap between a drafted token and its runner-up, how often a judged token is rejected
    and how often its runner-up is the correction then."""

    def __init__(self) -> None:
        self._judged = [_PRIOR_WEIGHT] * (len(_GAP_BOUNDS) + 1)
        self._rejected = [_PRIOR_WEIGHT * rate for rate in _PRIOR_REJECTED]
        self._correct = [_PRIOR_WEIGHT * rate for rate in _PRIOR_CORRECT]

    def observe(self, runner_ups: Sequence[RunnerUp], num_accepted: int, correction: int) -> None:
        """Counts a round in which `num_accepted` tokens were accepted, followed by `correction`."""
        for number, each in enumerate(runner_ups[: num_accepted + 1]):
            is_rejected = number == num_accepted
            index = bisect(_GAP_BOUNDS, each.gap)
            self._judged[index] = _DECAY * self._judged[index] + 1
            self._rejected[index] = _DECAY * self._rejected[index] + is_rejected
            is_correct = is_rejected and each.token_id == correction
            self._correct[index] = _DECAY * self._correct[index] + is_correct

    def acceptance(self, gap: float) -> float:
        """Returns the probability that a token is accepted."""
        index = bisect(_GAP_BOUNDS, gap)
        return 1 - self._rejected[index] / self._judged[index]

    def runner_up_rate(self, gap: float) -> float:
        """Returns the probability that a token is rejected and its runner-up is the correction."""
        index = bisect(_GAP_BOUNDS, gap)
        return self._correct[index] / self._judged[index]


Host = TypeVar("Host")


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Generic[Host]):
    """A place to draft from: after the first `offset` tokens of `host`'s draft and then `correction`; None:
    after the whole draft. `chance` is the probability that the verifier's sequence takes it."""

    host: Host
    offset: int
    correction: int | None
    chance: float


class BranchTree(Generic[Host]):
    """Holds the open branches of the rounds in flight: those that nothing was drafted on yet."""

    def __init__(self, rates: RejectionRates) -> None:
        self._rates = rates
        self._open: list[Branch[Host]] = []

    def best(self, is_allowed: Callable[[Branch[Host]], bool] | None = None) -> Branch[Host] | None:
        """Returns the likeliest of the open branches that are allowed."""
        allowed = self._open if is_allowed is None else filter(is_allowed, self._open)
        return max(allowed, key=lambda each: each.chance, default=None)

    def clear(self) -> None:
        """Removes all branches."""
        self._open.clear()

    def close(self, branch: Branch[Host]) -> None:
        """Removes a branch that a round was drafted on, or on which none can be."""
        self._open.remove(branch)

    def add(
        self,
        host: Host,
        length: int,
        chance: float,
        runner_ups: Sequence[RunnerUp],
        before: tuple[Host, int] | None = None,
    ) -> None:
        """Opens the branches of a new round of `length` tokens that is judged with probability `chance`.
        `before` is the round whose bonus judges the first token already, with the length of its draft."""
        for offset, each in enumerate(runner_ups):
            where = before if offset == 0 and before is not None else (host, offset)
            rate = self._rates.runner_up_rate(each.gap)
            self._open.append(Branch(*where, each.token_id, chance * rate))
            chance *= self._rates.acceptance(each.gap)
        self._open.append(Branch(host, length, None, chance))

    def retain(self, is_kept: Callable[[Host], bool], chance: float = 1.0) -> None:
        """Keeps the branches of the hosts that are kept, given an event that had probability `chance`."""
        self._open = [
            Branch(each.host, each.offset, each.correction, min(1.0, each.chance / chance))
            for each in self._open
            if is_kept(each.host)
        ]
