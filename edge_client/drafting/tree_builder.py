"""Grows a tree best first, in few runs: each run expands the most valuable nodes that are open.

The design of the order is EAGLE-2's (Li et al. 2024): a tree of n nodes is the n most valuable of all that were
found, which always hold the parents of each other since a child is never worth more than its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.common.tree import Tree
from outrider.common.types import Signals, TokenIds
from outrider.edge_client.drafting.base import NodeRule, Stop
from outrider.edge_client.drafting.node_values import AGREED, DIFFERED, NodeValues
from outrider.edge_client.drafting.trees import (
    Continuations,
    Expander,
    Growing,
    Ranks,
    TreeBudget,
    TreeDraft,
    depth_first,
    grow_by,
)


@dataclass(slots=True, eq=False)
class _Node:
    path: TokenIds
    value: float
    ranks: Ranks = ()
    continuations: tuple[Continuations, ...] = ()
    is_open: bool = True  # may be expanded
    is_copied: bool = False  # what costs no run told what follows
    is_dropped: bool = False  # likelier ones took its place
    children: list[_Node] = field(default_factory=list)
    signals: Signals | None = None
    doubted: Signals | None = None  # of the first node that the rule left out after it


class TreeBuilder:
    """Builds one tree from the continuations of one or several sources, whose paths a `rule` may end.

    `copies` are sources whose answers cost no run: every node that is found is shown to them at once, and what they
    tell is a node too, so that a copy reaches any depth without the draft.
    """

    def __init__(
        self,
        values: NodeValues,
        budget: TreeBudget,
        rule: NodeRule | None = None,
        copies: Sequence[Expander[Continuations]] = (),
    ) -> None:
        assert not (rule and copies), "a rule needs signals, which copies have not"
        self._copies = () if budget.shape else copies
        self._values = values
        self._budget = budget
        self._rule = rule
        self._shape = frozenset(budget.shape[: budget.num_nodes])
        self._inner = {ranks[:-1] for ranks in self._shape}  # that have children
        self._best: list[_Node] = []  # of all found, at most `num_nodes`; of equal ones those found first
        # Of first children, summed, and how many: a sure one to begin with.
        self._first_chances, self._num_expanded = 1.0, 1

    def build(self, sources: Sequence[Expander[Continuations]]) -> TreeDraft:
        """Returns the tree; no nodes where no source has a continuation."""
        return grow_by(self.grow(), sources)

    def grow(self) -> Growing[Continuations]:
        """Grows the tree.

        There are `max_depth` runs at most. All but the first expand a few nodes at once, so many that the budget
        could be filled with as many runs; of a given shape each expands a level. Where the budget has costs, no node
        is expanded, nor kept, that is worth less than what the tokens so far would gain in its time.
        """
        budget = self._budget
        root = _Node((), 1.0)
        if min(budget.num_nodes, budget.max_depth) <= 0:
            return TreeDraft((), ())
        self._copy([root])
        self._take([root], (yield [root.path]))
        for _ in range(budget.max_depth - 1):
            chosen = self._choose()
            if not chosen:
                break
            self._take(chosen, (yield [node.path for node in chosen]))
        return self._draft(root)

    def _choose(self) -> list[_Node]:
        """Returns the open nodes to expand: those from which a child may still enter the tree."""
        budget = self._budget
        best = self._best
        is_full = len(best) == budget.num_nodes
        least = max(best[-1].value if is_full else 0.0, self._least_value() / self._first_chance)
        worth = [
            node
            for node in best
            if node.is_open and len(node.path) < budget.max_depth and (node.value > least or not is_full)
        ]
        return worth if self._shape else worth[: -(-budget.num_nodes // budget.max_depth)]

    def _least_value(self) -> float:
        """Returns what a node has to be worth: the tokens that the round, as it is, gains in a node's time."""
        costs = self._budget.costs
        if costs is None:
            return 0.0
        total, rate = 1.0, 0.0
        for number, node in enumerate(self._best, start=1):
            total += node.value
            next_rate = total / (costs.round_s + number * costs.node_s)
            if next_rate < rate:
                break
            rate = next_rate
        return rate * costs.node_s

    @property
    def _first_chance(self) -> float:
        """Returns the mean chance of a first child."""
        return self._first_chances / self._num_expanded

    def _take(self, nodes: Sequence[_Node], told: Sequence[Sequence[Continuations]]) -> None:
        """Takes what the sources told of nodes, and finds their children."""
        for node, continuations in zip(nodes, zip(*told, strict=True), strict=True):
            if node.is_dropped:
                continue
            node.is_open = False
            node.continuations = (
                *continuations,
                *(_compared(each, continuations) for each in node.continuations),
            )
            self._find_children(node)
            if node.children:
                self._first_chances += node.children[0].value / node.value
                self._num_expanded += 1
        self._keep_best()
        self._copy([child for node in nodes for child in node.children])

    def _find_children(self, node: _Node) -> None:
        """Makes the children that all sources so far told of. What was found below one of them stays below it."""
        before = {child.path[-1]: child for child in node.children if not child.is_dropped}
        known = {id(child) for child in before.values()}
        node.children = []
        for rank, (token_id, chance) in enumerate(self._merge(node.continuations)):
            value, child = node.value * chance, before.pop(token_id, None)
            if child is None:
                child = _Node((*node.path, token_id), value, (*node.ranks, rank))
            else:
                _revalue(child, value)
            node.children.append(child)
        if self._shape:
            self._fit(node)
        self._apply_rule(node)
        self._best += [child for child in node.children if id(child) not in known]
        for child in before.values():
            for each in _below(child):
                each.is_dropped = True
        if before:
            self._best = [each for each in self._best if not each.is_dropped]

    def _keep_best(self) -> None:
        in_order = sorted(
            self._best, key=lambda node: (-node.value, len(node.path))
        )  # a parent before its child
        self._best = in_order[: self._budget.num_nodes]
        for each in in_order[self._budget.num_nodes :]:
            each.is_dropped = True

    def _copy(self, nodes: Sequence[_Node]) -> None:
        """Finds what copies tell after some nodes, and after what they told, as far as it may enter the tree."""
        if not self._copies:
            return
        budget = self._budget
        max_depth = max(budget.max_depth, budget.max_copied_depth)
        least_ever = 1 / (2 * budget.num_nodes)  # what the last node of a full tree is worth is above
        waiting = [node for node in nodes if not node.is_copied]
        while waiting:
            node = waiting.pop()
            is_full = len(self._best) >= budget.num_nodes
            least = max(least_ever, self._best[-1].value if is_full else 0.0)
            if node.is_dropped or len(node.path) >= max_depth or node.value <= least:
                continue
            node.is_copied = True
            told = tuple(each for copy in self._copies for each in copy.expand([node.path]) if each.token_ids)
            if told:
                node.continuations += told
                self._find_children(node)
                self._keep_best()
                waiting += reversed(node.children)

    def _fit(self, node: _Node) -> None:
        """Leaves of a node's children those that the shape has."""
        node.children = [child for child in node.children if child.ranks in self._shape]
        for child in node.children:
            child.is_open = child.ranks in self._inner

    def _apply_rule(self, node: _Node) -> None:
        """Ends the paths after a node that was expanded."""
        if self._rule is None:
            return
        told = {
            token_id: signals
            for each in node.continuations
            for token_id, signals in zip(each.token_ids, each.signals, strict=True)
        }
        kept = []
        for child in node.children:
            child.signals = signals = told[child.path[-1]]
            stop = self._rule(child.path, signals)
            child.is_open &= stop is Stop.NO
            if stop is Stop.BEFORE:
                node.doubted = node.doubted or signals
            else:
                kept.append(child)
        node.children = kept

    def _merge(self, continuations: Sequence[Continuations]) -> list[tuple[int, float]]:
        """Returns the likeliest children with their chances; one that several sources told has its best.

        Where what a source told first has a higher chance by it than by those before, the others share what is left.
        """
        chances: dict[int, float] = {}
        for each in continuations:
            told = list(zip(each.token_ids, self._values.chances(each), strict=True))
            if told and chances:
                first, claimed = told[0]
                before = chances.get(first, 0.0)
                left = (1 - claimed) / (1 - before) if before < claimed else 1.0
                chances = {token_id: left * chance for token_id, chance in chances.items()}
                chances[first] = max(before, claimed)
            for token_id, chance in told:
                chances[token_id] = max(chance, chances.get(token_id, 0.0))
        return sorted(chances.items(), key=lambda item: -item[1])[: self._budget.max_width]

    def _draft(self, root: _Node) -> TreeDraft:
        least = self._least_value()
        kept = {id(node) for number, node in enumerate(self._best) if number == 0 or node.value >= least}
        nodes, parents = depth_first(root, lambda node: [each for each in node.children if id(each) in kept])
        main_end = nodes[len(Tree(parents).runs[0]) - 1] if nodes else root
        return TreeDraft(
            token_ids=tuple(node.path[-1] for node in nodes),
            draft_probs=(),
            signals=tuple(node.signals for node in nodes if node.signals is not None),
            doubted=main_end.doubted,
            parents=tuple(parents),
            values=tuple(node.value for node in nodes),
            continuations=tuple(node.continuations for node in (root, *nodes)),
        )


def _compared(copied: Continuations, drafted: Sequence[Continuations]) -> Continuations:
    """Returns what a copy told as a source of its own, by whether a draft expects the same token: it is right far more
    often then."""
    firsts = [each.token_ids[0] for each in drafted if each.token_ids]
    if not firsts:
        return copied
    return replace(copied, source=copied.source + (AGREED if copied.token_ids[0] in firsts else DIFFERED))


def _below(node: _Node) -> Iterator[_Node]:
    """Yields a node and all after it."""
    yield node
    for child in node.children:
        yield from _below(child)


def _revalue(node: _Node, value: float) -> None:
    """Values a node anew, and all after it in proportion; none gets more than it."""
    factor = value / node.value
    for each in _below(node):
        each.value = min(value, factor * each.value)
