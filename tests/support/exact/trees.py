"""Drafts that are trees in the enumeration: tokens by node, texts by path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from support.exact.branching import PROMPT_LENGTH, BranchingRows, LazyDraft, Rules, Text, World
from support.exact.chance import Chance

from outrider.cloud_verifier.verification.methods.base import (
    Outcome,
    RoundInput,
    UniformDraws,
    VerificationMethod,
)
from outrider.cloud_verifier.verification.methods.supports import Remainder
from outrider.cloud_verifier.verification.methods.tree import follow_sample
from outrider.common.noise.draws import Purpose
from outrider.common.tree import ROOT, Tree
from outrider.common.types import CorrectionKind


def cut_to_depth(parents: Sequence[int], depth: int) -> tuple[int, ...]:
    """The parents of a tree without the nodes at `depth` or deeper; those are last on their paths."""
    tree = Tree(parents)
    kept = [node for node in range(len(tree)) if tree.depths[node] < depth]
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    return tuple(place[parents[node]] for node in kept)


class LazyTree(LazyDraft):
    """A tree whose likeliest path is drawn with the target's noise; a later sibling is the next id, and what follows
    that is a function of the text alone."""

    def __init__(
        self, world: World, rules: Rules, text: Text, parents: tuple[int, ...], chance: Chance
    ) -> None:
        super().__init__(world, rules, text, len(parents), chance)
        self.tree = Tree(parents)
        self._tokens: dict[int, int] = {}

    def token(self, index: int) -> int:
        if index not in self._tokens:
            self._tokens[index] = self._token(index)
        return self._tokens[index]

    def _token(self, node: int) -> int:
        tree, text = self.tree, self.text_before(self.tree.parents[node] + 1)
        num_tokens = len(self._world.target(text))
        siblings = tree.children(tree.parents[node])
        if (number := siblings.index(node)) > 0:
            return (self.token(siblings[0]) + number) % num_tokens
        if tree.path(node) != list(range(node + 1)):  # not on the likeliest path
            return sum(text) % num_tokens
        support = self._world.support(text)
        shares = dict(zip(support.token_ids, support.weights, strict=True))
        weights = tuple(float(shares.get(token_id, 0)) for token_id in range(num_tokens))
        position = PROMPT_LENGTH + len(self._text) + tree.depths[node]
        return self._chance.race((Purpose.COUPLED, position, 0), weights)

    def text_before(self, row: int) -> Text:
        return (*self._text, *(self.token(node) for node in self.tree.path(row - 1)))


Grow = Callable[["DrawnTree", int, int], bool]
"""Whether a node (its index) of a drawn tree gets its child number n; it may read what was drawn by then."""


class DrawnTree(LazyTree):
    """A tree whose children are drawn from their node's support without replacement, as `sparse` has it. `grow` cuts
    its planned shape; no node has more children than its support has ids."""

    def __init__(
        self,
        world: World,
        rules: Rules,
        text: Text,
        parents: tuple[int, ...],
        chance: Chance,
        grow: Grow | None = None,
    ) -> None:
        super().__init__(world, rules, text, parents, chance)
        self.tree = _CutTree(parents, self._num_children)
        self._planned, self._grow = Tree(parents), grow

    def siblings(self, node: int) -> Sequence[int]:
        """All that were planned after its parent."""
        return self._planned.children(self._planned.parents[node])

    def _num_children(self, node: int) -> int:
        planned = self._planned.children(node)
        most = min(len(planned), len(self.support(node + 1).token_ids)) if planned else 0
        if self._grow is not None:
            return next((n for n in range(most) if not self._grow(self, node, n)), most)
        return most

    def _token(self, node: int) -> int:
        before = self.siblings(node)[: self.siblings(node).index(node)]
        support = self.support(self._planned.parents[node] + 1)
        taken = [self.token(each) for each in before]
        pairs = zip(support.token_ids, support.weights, strict=True)
        weights = [0 if token_id in taken else weight for token_id, weight in pairs]
        key = (Purpose.DRAFT, PROMPT_LENGTH + len(self._text), node)
        return support.token_ids[self._chance.pick(key, weights)]


class _CutTree(Tree):
    """A tree that has only the first children of each node."""

    def __init__(self, parents: Sequence[int], num_children: Callable[[int], int]) -> None:
        super().__init__(parents)
        self._num_children = num_children

    def children(self, node: int) -> Sequence[int]:
        return super().children(node)[: self._num_children(node)]


def first_nodes(tree: Tree, num: int) -> Tree:
    """The first nodes of a tree, of which it may have only some children."""
    parents = tree.parents[:num]
    if not isinstance(tree, _CutTree):
        return Tree(parents)
    return _CutTree(parents, tree._num_children)


class TreeRows(BranchingRows):
    """`TargetRows` of a tree: noise by the depth of a row."""

    def __init__(self, world: World, text: Text, draft: LazyTree, chance: Chance) -> None:
        super().__init__(world, text, draft, chance)
        self._tree = draft.tree

    def target_sample(self, row: int) -> int:
        depth = 0 if row == 0 else self._tree.depths[row - 1] + 1
        return self._chance.race((Purpose.COUPLED, self._position + depth, 0), self._probs(row))


class BiasedTree:
    """`coupled` on trees but for one mistake: where the sample has no node, a first sibling is taken all the same
    with a small probability."""

    def __init__(self, probability: float) -> None:
        self._probability = probability

    def verify(self, round_input: RoundInput) -> Outcome:
        tree, rows = round_input.tree, round_input.rows
        assert tree is not None
        nodes = follow_sample(round_input, tree)
        last = nodes[-1] if nodes else ROOT
        siblings = tree.children(last)
        if siblings and round_input.draws.accepts(self._probability, siblings[0]):
            nodes.append(siblings[0])
            last = siblings[0]
        kind = CorrectionKind.CORRECTION if tree.children(last) else CorrectionKind.BONUS
        return Outcome(len(nodes), rows.target_sample(last + 1), kind, math.nan, tuple(nodes))


class BiasedSibling:
    """`sparse` on trees but for one mistake: siblings after the first are accepted a little too often."""

    def __init__(self, method: VerificationMethod, probability: float) -> None:
        self._method, self._probability = method, probability

    def verify(self, round_input: RoundInput) -> Outcome:
        tree, draws, more = round_input.tree, round_input.draws, self._probability
        assert tree is not None

        class Draws(UniformDraws):
            def accepts(self, probability: float, offset: int) -> bool:
                is_first = tree.children(tree.parents[offset])[0] == offset
                return draws.accepts(probability if is_first else probability + more, offset)

        return self._method.verify(dataclasses.replace(round_input, draws=Draws()))


class SameRemainder(Remainder):
    """What is left but for one mistake: q (`keeps_draft`) or p stays what it was."""

    keeps_draft = False

    def reject(self, token_id: int) -> None:
        weights, target = self._weights.copy(), self._target
        super().reject(token_id)
        if self.keeps_draft:
            self._weights = weights
        else:
            self._target = target


class SameDraft(SameRemainder):
    keeps_draft = True
