"""Where the target's token is among the continuations that a draft tells: what trees of any shape replay.

After right tokens a draft tells the text's next token at its rank; after a wrong one nothing that it tells is right,
and its gaps are those of another place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.common.types import TokenIds
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.drafting.node_values import DRAFT_PRIOR
from outrider.edge_client.drafting.trees import DRAFT_SOURCE, MAX_CONTINUATIONS, Continuations
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, NO_RANK, TextTrace

_STRIDE = 7919  # to another place of a trace

Gaps = tuple[float, ...]


class Ranks(Protocol):
    """Tells ranks and gaps of drafts made at any index of a text, as `TracedText` counts them."""

    def at(self, index: int, depth: int) -> tuple[int | None, Gaps]:
        """Returns the rank of the text's token after `depth` drafted tokens that are right, None where it is none of
        the continuations, and the gaps of these."""

    def beside(self, index: int, path: TokenIds) -> Gaps:
        """Returns gaps after a path that is wrong."""


class RecordedRanks:
    """Replays a recorded text. It repeats where a draft goes on past the trace."""

    def __init__(self, trace: TextTrace) -> None:
        """Takes a trace with ranks."""
        assert trace.ranks is not None and trace.rank_gaps is not None, "recorded without ranks"
        self._ranks = [None if rank == NO_RANK else rank for rank in trace.ranks.tolist()]
        self._gaps = [tuple(gap for gap in row if gap < math.inf) for row in trace.rank_gaps.tolist()]

    def at(self, index: int, depth: int) -> tuple[int | None, Gaps]:
        place = (index + depth) % len(self._ranks)
        return self._ranks[place], self._gaps[place]

    def beside(self, index: int, path: TokenIds) -> Gaps:
        return self._gaps[(index + _STRIDE * (1 + sum(path))) % len(self._gaps)]


class DrawnRanks:
    """Draws ranks by given chances: that of the first continuation by its depth, those of the others as the
    controller expects them."""

    def __init__(
        self, falls: NDArray[np.bool_], alphas: Sequence[float], source: np.random.Generator
    ) -> None:
        """`falls` [positions, depths] says where the first continuation is wrong."""
        shares = _later_shares()
        later = source.choice(len(shares) + 1, falls.shape, p=[*shares, 1 - sum(shares)]) + 1
        ranks = np.where(falls, later, 0)
        self._ranks = np.where(ranks < MAX_CONTINUATIONS, ranks, NO_RANK).tolist()
        self._gaps = [_gaps_of(alpha) for alpha in alphas]

    def at(self, index: int, depth: int) -> tuple[int | None, Gaps]:
        depth = min(depth, MAX_DEPTH - 1)
        rank, gaps = self._ranks[index][depth], self._depth_gaps(depth)
        return (rank if rank < len(gaps) else None), gaps

    def beside(self, index: int, path: TokenIds) -> Gaps:
        return self._depth_gaps(len(path))

    def _depth_gaps(self, depth: int) -> Gaps:
        return self._gaps[min(depth, len(self._gaps) - 1)]


def _later_shares() -> list[float]:
    """Returns how the cases in which the first continuation is wrong are shared among the later ones."""
    left, shares = 1.0, []
    for number in range(MAX_CONTINUATIONS - 1):
        share = left * (SETTINGS.later_choice_share if number else SETTINGS.second_choice_share)
        shares.append(share)
        left -= share
    return shares


@lru_cache(256)
def _gaps_of(alpha: float) -> Gaps:
    """Returns the gaps by which `NodeValues` expects just the given chances, before it learned others."""
    chances = [alpha] + [share * (1 - alpha) for share in _later_shares()]
    first = max(chances)
    falling = [min(chance, before) for chance, before in zip(chances[1:], chances, strict=False)]
    return (0.0, *(DRAFT_PRIOR.tau * math.log(first / chance) for chance in falling if chance > 0))


@dataclass(frozen=True, slots=True)
class TracedPaths:
    """Tells what follows the paths of one tree, drafted after `position` tokens at `index` of its trace."""

    ranks: Ranks
    words: Words
    index: int
    position: int

    def tell(self, path: TokenIds) -> Continuations:
        """Returns what may follow a path."""
        here, depth = self.position + len(path), len(path)
        if path == self.words.drafted(self.position, depth, depth):
            rank, gaps = self.ranks.at(self.index, depth)
        else:
            rank, gaps = None, self.ranks.beside(self.index, path)
        token_ids = list(self.words.others(here, len(gaps)))
        if rank is not None:
            (token_ids[rank],) = self.words.drafted(here, 1, 1)
        return Continuations(tuple(token_ids), gaps, DRAFT_SOURCE)


class Words(Protocol):
    """Gives token ids of a text by position."""

    def drafted(self, position: int, num_drafted: int, num_right: int) -> TokenIds:
        """Returns a draft after `position` tokens of which the first `num_right` agree with the target and the
        next one does not."""

    def others(self, position: int, num_ids: int) -> TokenIds:
        """Returns ids that the text does not have after `position` tokens."""
