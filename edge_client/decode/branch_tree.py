"""The places to draft from while rounds are in flight: after all of them, or after a predicted correction.

With `coupled` the edge knows the noise: where a token of its draft is rejected, the correction is often the
draft's own runner-up, and rejections are likely where the two scored nearly the same. So besides the sequence
in which every draft is accepted there are others worth drafting after: the draft up to some token, and that
token's runner-up instead of it.

    text   [ a b c d ]──[ e f g h ]──            in flight, if all of it is accepted
                │  │       │
                │  └ d'    └ f' ──[ i j k l ]     a speculative branch: e accepted, f rejected, f' its correction
                └ c'

The leaves of a tree are such places too: what it drafted beside the likeliest path needs no prediction.

Each branch has a probability that the verifier's sequence takes it; the likeliest is drafted next. Does no
I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from outrider.common.types import RunnerUp
from outrider.edge_client.controller.acceptance import BranchAcceptance

Host = TypeVar("Host")


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Generic[Host]):
    """A place to draft from: after the tokens of `host`'s draft at `nodes` and then `correction`; None: after the
    whole draft, or a path of a tree to one of its leaves. `chance` is the probability that the verifier's sequence
    takes it."""

    host: Host
    nodes: Sequence[int]
    correction: int | None
    chance: float
    is_guess: bool  # it is not the likeliest path of its host's draft


class BranchTree(Generic[Host]):
    """Holds the open branches of the rounds in flight: those that nothing was drafted on yet."""

    def __init__(self, rates: BranchAcceptance) -> None:
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
        before: tuple[Host, Sequence[int]] | None = None,
    ) -> None:
        """Opens the branches of a new round of `length` tokens that is judged with probability `chance`.
        `before` is the round whose bonus judges the first token already, with the nodes of its draft."""
        for offset, each in enumerate(runner_ups):
            where = before if offset == 0 and before is not None else (host, range(offset))
            rate = self._rates.runner_up_rate(each.gap)
            self._open.append(Branch(*where, each.token_id, chance * rate, is_guess=True))
            chance *= self._rates.accept_rate(each.gap)
        self._open.append(Branch(host, range(length), None, chance, is_guess=False))

    def add_paths(self, host: Host, paths: Sequence[Sequence[int]], chances: Sequence[float]) -> None:
        """Opens the branches after some paths of a new round's tree, the likeliest first."""
        for number, (path, chance) in enumerate(zip(paths, chances, strict=True)):
            self._open.append(Branch(host, path, None, chance, is_guess=number > 0))

    def retain(self, is_kept: Callable[[Host], bool], chance: float = 1.0) -> None:
        """Keeps the branches of the hosts that are kept, given an event that had probability `chance`."""
        self._open = [
            replace(each, chance=min(1.0, each.chance / chance)) for each in self._open if is_kept(each.host)
        ]
