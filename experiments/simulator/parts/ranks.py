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

from outrider.common.types import DRAFT_SOURCE, TokenIds
from outrider.edge_client.controller.tree_policy import choice_rates
from outrider.edge_client.drafting.node_values import DRAFT_PRIOR
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Continuations
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, NO_RANK, TextTrace

STRIDE = 7919  # to another place of a trace
_MIN_ALPHA = 0.01  # of a draft that is never right

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
        return self._gaps[(index + STRIDE * (1 + sum(path))) % len(self._gaps)]


class DrawnRanks:
    """Draws ranks by given chances: that of the first continuation by its depth, those of the others as the
    controller expects them."""

    def __init__(
        self, falls: NDArray[np.bool_], alphas: Sequence[float], source: np.random.Generator
    ) -> None:
        """`falls` [positions, depths] says where the first continuation is wrong."""
        ranks = np.zeros(falls.shape, np.uint8)
        for depth, alpha in enumerate(alphas):
            columns = slice(depth, depth + 1 if depth + 1 < len(alphas) else None)
            ranks[:, columns] = _draw_later(alpha, ranks[:, columns].shape, source)
        self._ranks = np.where(falls, ranks, 0).tolist()
        self._gaps = [_gaps_of(alpha) for alpha in alphas]

    def at(self, index: int, depth: int) -> tuple[int | None, Gaps]:
        rank = self._ranks[index][min(depth, MAX_DEPTH - 1)]
        return (None if rank == NO_RANK else rank), self._depth_gaps(depth)

    def beside(self, index: int, path: TokenIds) -> Gaps:
        return self._depth_gaps(len(path))

    def _depth_gaps(self, depth: int) -> Gaps:
        return self._gaps[min(depth, len(self._gaps) - 1)]


@lru_cache(256)
def _rates(alpha: float) -> list[float]:
    """Returns how often each continuation is right; those that never are have no place."""
    rates = choice_rates(max(_MIN_ALPHA, alpha), MAX_CONTINUATIONS)
    return [rate for rate in rates if rate > 0]


def _draw_later(alpha: float, shape: tuple[int, ...], source: np.random.Generator) -> NDArray[np.uint8]:
    """Draws the place of the right continuation where the first is wrong."""
    chances = [rate / (1 - alpha) for rate in _rates(alpha)[1:]]
    chances.append(max(0.0, 1 - sum(chances)))
    places = [*range(1, len(chances)), NO_RANK]
    return source.choice(places, shape, p=np.array(chances) / sum(chances)).astype(np.uint8)


@lru_cache(256)
def _gaps_of(alpha: float) -> Gaps:
    """Returns the gaps by which `NodeValues` expects just the given chances, before it learned others."""
    rates = _rates(alpha)
    return tuple(DRAFT_PRIOR.tau * math.log(rates[0] / rate) for rate in rates)


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
