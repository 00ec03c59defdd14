"""Grows a tree whose children are drawn from their node's distribution without replacement, for `sparse`.

What is drawn stays in the tree: a child left out for what it is would be a sample of something else than q
(docs/trees.md). So the next child of a node is valued before it is drawn, by what may be drawn, and drawn only where
that value is enough. Which node is expanded and which gets another child depends on what was drawn so far, and on
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.common.noise.philox import Purpose, first_word
from outrider.common.sampling.support import sample_support, support_prob
from outrider.common.types import SamplingParams, Support, TokenIds
from outrider.edge_client.drafting.draw_chances import DrawChances, without
from outrider.edge_client.drafting.trees import (
    Expander,
    Growing,
    TreeBudget,
    TreeDraft,
    depth_first,
    grow_by,
)

Draw = Callable[[Support, int], int]
"""Takes what is left of a support and how many children the tree has, and returns the id of its next child."""


def make_draw(sampling: SamplingParams, start: int) -> Draw:
    """Returns the draws of one tree after `start` tokens: keyed (seed, DRAFT, start, number of the draw).

    At temperature 0 the likeliest id is taken: the target's p is 1 at one id, which is accepted and corrected to
    whatever q was.
    """
    if sampling.temperature == 0:
        return lambda left, _: left.token_ids[left.weights.index(max(left.weights))]
    return lambda left, number: sample_support(left, first_word(sampling.seed, Purpose.DRAFT, start, number))


@dataclass(slots=True, eq=False)
class _Node:
    path: TokenIds
    value: float  # the chance that it is accepted
    reach: float  # that it is, and its children so far are rejected
    is_open: bool = True  # not expanded
    support: Support | None = None
    left: Support = field(default_factory=lambda: Support((), ()))  # of the support, for the next child
    next_value: float = 0.0  # of the next child; 0: there is none
    children: list[_Node] = field(default_factory=list)


class DrawnTreeBuilder:
    """Builds one tree from the distributions of one source."""

    def __init__(self, draw: Draw, chances: DrawChances, budget: TreeBudget) -> None:
        self._draw_from = draw
        self._chances, self._budget = chances, budget
        self._root = _Node((), 1.0, 1.0)
        self._nodes: list[_Node] = []  # drawn

    def build(self, source: Expander[Support | None]) -> TreeDraft:
        """Returns the tree; no nodes where the source has no distribution for the sequence itself."""
        return grow_by(self.grow(), [source])

    def grow(self) -> Growing[Support | None]:
        """Grows the tree by what one source tells.

        There are `max_depth` runs at most. Each but the first expands a few nodes, so many that the budget could be
        filled with as many runs. A child is drawn where it is worth as much as a node of a full tree usually is, or
        as what an open node promises; what is left of the budget after the last run goes to the best ones.
        """
        budget = self._budget
        if min(budget.num_nodes, budget.max_depth) <= 0:
            return TreeDraft((), ())
        self._take([self._root], *(yield [self._root.path]))
        for _ in range(budget.max_depth - 1):
            self._draw(1 / budget.num_nodes)  # about what the last node of a full tree is worth
            chosen = self._choose()
            if not chosen:
                break
            self._take(chosen, *(yield [node.path for node in chosen]))
        self._draw(0.0)
        return self._draft()

    def _choose(self) -> list[_Node]:
        """Returns the open nodes to expand: none once the budget is used up."""
        budget = self._budget
        if len(self._nodes) >= budget.num_nodes:
            return []
        least = self._least_value()
        worth = [node for node in self._open() if node.value * self._first_chance >= least]
        return sorted(worth, key=lambda node: -node.value)[: -(-budget.num_nodes // budget.max_depth)]

    def _open(self) -> list[_Node]:
        return [node for node in self._nodes if node.is_open and len(node.path) < self._budget.max_depth]

    @property
    def _first_chance(self) -> float:
        """Returns the chance of a first child that nothing is known about."""
        return self._chances.chance(0, 0.5)

    def _draw(self, enough: float) -> None:
        """Draws the most valuable children while they are worth `enough`, or as much as an open node's first."""
        expanded = [self._root, *(node for node in self._nodes if not node.is_open)]
        promised = max((node.value * self._first_chance for node in self._open()), default=0.0)
        while len(self._nodes) < self._budget.num_nodes:
            node = max(expanded, key=lambda each: each.next_value)
            if node.next_value <= 0.0 or node.next_value < min(enough, promised):
                return
            if self._nodes and node.next_value < self._least_value():
                return
            child = self._draw_child(node)
            promised = max(promised, child.value * self._first_chance)

    def _draw_child(self, node: _Node) -> _Node:
        token_id = self._draw_from(node.left, len(self._nodes))
        chance = self._chances.chance(len(node.children), support_prob(node.left, token_id))
        value = node.reach * chance
        child = _Node((*node.path, token_id), value, value)
        self._nodes.append(child)
        node.children.append(child)
        node.reach -= value
        node.left = without(node.left, token_id)
        self._value_next(node)
        return child

    def _take(self, nodes: Sequence[_Node], supports: Sequence[Support | None]) -> None:
        for node, support in zip(nodes, supports, strict=True):
            node.is_open = False
            if support is not None:
                node.support = node.left = support
                self._value_next(node)

    def _value_next(self, node: _Node) -> None:
        number, has_next = len(node.children), bool(node.left.token_ids)
        if has_next and number < self._budget.max_width:
            node.next_value = node.reach * self._chances.mean_chance(number, node.left)
        else:
            node.next_value = 0.0

    def _least_value(self) -> float:
        """Returns what a node has to be worth: the tokens that the round, as it is, gains in a node's time."""
        costs = self._budget.costs
        if costs is None:
            return 0.0
        num_tokens = 1.0 + sum(node.value for node in self._nodes)
        return num_tokens * costs.node_s / (costs.round_s + len(self._nodes) * costs.node_s)

    def _draft(self) -> TreeDraft:
        nodes, parents = depth_first(self._root, lambda node: node.children)
        supports: list[Support] = []
        for node in (self._root, *nodes):
            if node.children:
                assert node.support is not None, "children are drawn from a support"
                supports.append(node.support)
        return TreeDraft(
            token_ids=tuple(node.path[-1] for node in nodes),
            draft_probs=(),
            supports=tuple(supports),
            parents=tuple(parents),
            values=tuple(node.value for node in nodes),
        )
