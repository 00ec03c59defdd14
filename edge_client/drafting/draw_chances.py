"""Estimates the chance that a drawn child of a tree is accepted, and learns it from every verdict.

Where children are drawn from a node's support without replacement (`sparse`), child number r that had the probability
q when it was drawn is accepted, once those before it were rejected, with a chance that grows with q: `_at_zero` +
`_slope`·q for r = 0, 1 and more, times a factor that is learned for each range of q. A child that is not drawn yet has
the mean over what may be drawn.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from outrider.common.tree import Tree
from outrider.common.types import Draft, Support

# First guesses, from the embedded pair at temperature 0.8 with supports of 16 ids.
_AT_ZERO = (0.57, 0.10, 0.05)  # by number of the child; later ones have the last
_SLOPE = (0.42, 0.50, 0.35)
_BOUNDS = (0.1, 0.35, 0.65, 0.9)  # of the ranges of q
_PRIOR_WEIGHT = 6.0  # accepted children that the first guess counts for
_MEMORY = 500.0  # observations after which an old one counts for 1/e of a new one


class DrawChances:
    """Learns factors. Pure: depends on nothing but what it was told."""

    def __init__(self) -> None:
        shape = (len(_AT_ZERO), len(_BOUNDS) + 1)
        self._num_accepted = np.full(shape, _PRIOR_WEIGHT)
        self._num_expected = np.full(shape, _PRIOR_WEIGHT)

    def chance(self, number: int, draft_prob: float) -> float:
        """Returns the chance of child `number`, which had the probability `draft_prob` when it was drawn."""
        row, column = _place(number, draft_prob)
        factor = self._num_accepted[row, column] / self._num_expected[row, column]
        return min(1.0, float(factor) * _guess(row, draft_prob))

    def mean_chance(self, number: int, left: Support) -> float:
        """Returns the chance of child `number` before it is drawn from what is left of a support."""
        total = sum(left.weights)
        return sum(w / total * self.chance(number, w / total) for w in left.weights)

    def observe(self, draft: Draft, accepted_nodes: Sequence[int], next_token: int | None) -> None:
        """Learns from a verdict on a drawn tree: the nodes that were accepted, from the root on, and the token after
        them; None where there was none, so that nothing was judged after the last."""
        tree = Tree(draft.parents)
        supports = dict(zip(tree.internal, draft.supports, strict=True))
        path = (-1, *accepted_nodes)
        for node, accepted in zip(path, (*accepted_nodes, None), strict=True):
            if accepted is None and next_token is None:
                return
            left = supports.get(node)
            for number, child in enumerate(tree.children(node)):
                assert left is not None, "a node with children has a support"
                token_id = draft.token_ids[child]
                place = left.token_ids.index(token_id)
                self._count(number, left.weights[place] / sum(left.weights), child == accepted)
                if child == accepted:
                    break
                left = without(left, token_id)

    def _count(self, number: int, draft_prob: float, is_accepted: bool) -> None:
        row, column = _place(number, draft_prob)
        for counts, count in (
            (self._num_accepted, is_accepted),
            (self._num_expected, _guess(row, draft_prob)),
        ):
            counts[row, column] += count - (counts[row, column] - _PRIOR_WEIGHT) / _MEMORY


def without(support: Support, token_id: int) -> Support:
    """Returns a support without one of its ids: what the next child is drawn from. It may be empty."""
    place = support.token_ids.index(token_id)
    ids, weights = support.token_ids, support.weights
    return Support((*ids[:place], *ids[place + 1 :]), (*weights[:place], *weights[place + 1 :]))


def _place(number: int, draft_prob: float) -> tuple[int, int]:
    return min(number, len(_AT_ZERO) - 1), bisect(_BOUNDS, draft_prob)


def _guess(row: int, draft_prob: float) -> float:
    return _AT_ZERO[row] + _SLOPE[row] * draft_prob
