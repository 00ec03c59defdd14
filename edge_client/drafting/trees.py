"""Defines what a drafted tree is made of: its budget, the continuations that sources tell, the result, and the
order of its nodes.

A node is one drafted token, a path the tokens from the committed ones to it. Several nodes may follow the same
path: the target's own token is then among two or three of them far more often than it is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from outrider.common.tree import ROOT
from outrider.common.types import Draft, Signals, TokenIds

Told = TypeVar("Told")
Told_co = TypeVar("Told_co", covariant=True)
NodeT = TypeVar("NodeT")

# Bounds of a tree where none are given.
DEFAULT_NODES = 64
DEFAULT_DEPTH = 12  # runs of a draft model
DEFAULT_WIDTH = 4  # children of a node
MAX_CONTINUATIONS = 8  # of one path; the target's token is among the draft's first eight 99 times of 100


Ranks = tuple[int, ...]  # a node by its path: 0 is the likeliest continuation, 1 the next


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Holds what a round takes, in seconds: whatever its tree, and for each of its nodes."""

    round_s: float
    node_s: float


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """Bounds one tree."""

    num_nodes: int
    max_depth: int  # nodes on the longest path, and runs of a draft model
    max_width: int  # children of one node, `MAX_CONTINUATIONS` at most
    # Given, nodes are left out that are worth less than they cost: the tree has the most tokens a second.
    costs: TreeCosts | None = None
    # Given, the first `num_nodes` of these are the nodes, whatever they are worth.
    shape: tuple[Ranks, ...] = ()
    # Nodes on the longest path of copies, which cost no run; `max_depth` where that is more.
    max_copied_depth: int = 0


@dataclass(frozen=True, slots=True)
class Continuations:
    """Holds what one source expects after one path, likeliest first."""

    token_ids: TokenIds
    gaps: tuple[float, ...]  # nats that each scores less than the first: rising, from 0
    source: str  # names what `NodeValues` learns about together
    signals: tuple[Signals, ...] = ()  # of each, where they are asked for


@dataclass(frozen=True, slots=True)
class TreeDraft(Draft):
    """Holds a proposed tree, depth-first, the likeliest child first; see `outrider.common.tree`.

    `continuations[0]` were told for the committed tokens and `continuations[i + 1]` for node i, one a source; none
    where no source was asked. They are what is learned from when the verdict is known. A tree whose children were drawn
    has none at all: what is learned from is in `supports`.
    """

    values: tuple[float, ...] = ()  # the estimated chance that each node is accepted
    continuations: tuple[tuple[Continuations, ...], ...] = ()
    num_runs: int = 0  # of a draft model

    def pruned(self, nodes: Sequence[int]) -> TreeDraft:
        """Returns the tree of some nodes, in order, with each the one before it. Its children were not drawn."""
        assert not self.supports, "what is drawn stays"
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        return replace(
            self,
            token_ids=tuple(self.token_ids[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            signals=tuple(self.signals[node] for node in nodes if self.signals),
            values=tuple(self.values[node] for node in nodes if self.values),
            continuations=tuple(
                self.continuations[row] for row in (0, *(node + 1 for node in nodes)) if self.continuations
            ),
        )


class Expander(Protocol[Told_co]):
    """Tells what may follow some paths of one sequence, for one tree: `Continuations`, or the distribution that
    children are drawn from."""

    num_runs: int
    """Counts the runs of a draft model so far."""

    def expand(self, paths: Sequence[TokenIds]) -> Sequence[Told_co]:
        """Returns what may follow each path: at most `MAX_CONTINUATIONS`, or `MAX_SUPPORT_SIZE` ids with weights;
        possibly nothing.

        The first call has the empty path alone; each later path is one that was expanded before, with one of its
        continuations, or with one that another source told.
        """


Growing = Generator[list[TokenIds], Sequence[Sequence[Told]], TreeDraft]
"""Is a tree that grows: it yields the paths to expand, takes what each source tells of each, and returns the tree. Its
first paths are the empty one alone, as those of `Expander.expand` are."""


def grow_by(growing: Growing[Told], sources: Sequence[Expander[Told]]) -> TreeDraft:
    """Returns the tree that some sources tell of."""
    try:
        paths = next(growing)
        while True:
            paths = growing.send([source.expand(paths) for source in sources])
    except StopIteration as end:
        draft: TreeDraft = end.value
    return replace(draft, num_runs=sum(source.num_runs for source in sources))


def depth_first(root: NodeT, children: Callable[[NodeT], Sequence[NodeT]]) -> tuple[list[NodeT], list[int]]:
    """Returns the nodes below `root`, depth-first with the first child first, and the index of each one's parent, as
    `outrider.common.tree` has them."""
    nodes, parents = list[NodeT](), list[int]()
    waiting = [(child, ROOT) for child in reversed(children(root))]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(children(node))]
        nodes.append(node)
        parents.append(parent)
    return nodes, parents
