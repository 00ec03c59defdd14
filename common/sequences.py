"""Computes common prefixes and acceptance by position for both sides, the planner and the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens the two sequences have in common before they first differ."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))


class PositionCounts(NamedTuple):
    """Counts the rounds that drafted a token at one position, that accepted all tokens before it (reached),
    and that accepted it too."""

    drafted: int
    reached: int
    accepted: int


def acceptance_by_position(rounds: Iterable[tuple[int, int]]) -> list[PositionCounts]:
    """Returns the counts of each draft position, the first one first, over rounds of (accepted, drafted)."""
    pairs = list(rounds)
    found = []
    for position in range(max((num_drafted for _, num_drafted in pairs), default=0)):
        having = [num_accepted for num_accepted, num_drafted in pairs if num_drafted > position]
        reached = sum(num_accepted >= position for num_accepted in having)
        found.append(PositionCounts(len(having), reached, sum(a > position for a in having)))
    return found
