"""A draft that is a tree: several continuations of one sequence, which share their beginnings.

    parents  [-1, 0, 1, 0, -1]             -1 ┬ 0 ┬ 1 ─ 2
                                              │   └ 3
                                              └ 4

A node is one drafted token; `parents[i] < i` is the node before it, `ROOT` the sequence itself. Nodes are in
depth-first order, the likeliest child first, so that the likeliest path leads and a chain is the tree with one leaf.
With `sparse`, children are in the order in which they were drawn, which is that in which they are judged; otherwise
only speed depends on the order. No parents at all stand for a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from outrider.common.errors import InvalidFieldError
from outrider.common.types import Support

ROOT = -1
_NO_SUPPORT = Support((), ())


class Tree:
    """Answers questions about the shape of a tree whose parents are valid (`check_parents`)."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        """Returns the number of nodes before each node on its path: 0 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> Sequence[int]:
        """Returns the children of a node, or of `ROOT`, in order."""
        return self._children.get(node, ())

    @cached_property
    def internal(self) -> list[int]:
        """Returns the nodes that have children, in order, `ROOT` first."""
        return sorted(self._children)

    def child(self, node: int, token_ids: Sequence[int], token_id: int) -> int | None:
        """Returns the child of a node that holds `token_id`; `token_ids` are those of all nodes."""
        return next((child for child in self.children(node) if token_ids[child] == token_id), None)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from a child of the root to `node`; none for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def runs(self) -> list[range]:
        """Returns the longest runs of nodes of which each is the parent of the next: of a depth-first tree as many
        as it has leaves."""
        starts = [node for node, parent in enumerate(self.parents) if parent != node - 1 or node == 0]
        stops = [*starts[1:], len(self)]
        return [range(start, stop) for start, stop in zip(starts, stops, strict=False)]

    @property
    def num_main_nodes(self) -> int:
        """Returns how many nodes the likeliest path has, which are the first ones."""
        ends = (node for node, parent in enumerate(self.parents) if parent != node - 1)
        return next(ends, len(self))

    @property
    def ancestor_mask(self) -> list[list[bool]]:
        """Returns [nodes, nodes]: whether a node (row) is, or comes after, another one (column)."""
        mask: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = [False] * len(self) if parent == ROOT else mask[parent].copy()
            row[node] = True
            mask.append(row)
        return mask

    def below(self, node: int) -> list[int]:
        """Returns the nodes that come after `node`, without itself."""
        found = {node}
        for other, parent in enumerate(self.parents):
            if parent in found:
                found.add(other)
        return sorted(found - {node})

    def subtree(self, node: int) -> tuple[list[int], tuple[int, ...]]:
        """Returns the nodes below `node`, and the parents of the tree that they are once `node` is its root."""
        kept = self.below(node)
        place = {node: ROOT} | {each: index for index, each in enumerate(kept)}
        return kept, tuple(place[self.parents[each]] for each in kept)


def supports_by_row(tree: Tree, supports: Sequence[Support]) -> tuple[Support, ...]:
    """Returns what the children of each node were drawn from, `ROOT` first, an empty support after a leaf; `supports`
    are those of the internal nodes."""
    of_node = dict(zip(tree.internal, supports, strict=True))
    return tuple(of_node.get(node, _NO_SUPPORT) for node in range(ROOT, len(tree)))


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether each node is the only child of the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def has_path(token_ids: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> bool:
    """Returns whether a draft has these tokens one after another from its root."""
    if not parents:
        return tuple(token_ids[: len(path)]) == tuple(path)
    return len(nodes_along(token_ids, parents, path)) == len(path)


def nodes_along(token_ids: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """Returns the nodes of a tree that hold the first tokens of `path`, as far as it has them."""
    tree, nodes = Tree(parents), list[int]()
    for token_id in path:
        found = tree.child(nodes[-1] if nodes else ROOT, token_ids, token_id)
        if found is None:
            break
        nodes.append(found)
    return nodes


def main_path(token_ids: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens of a draft's likeliest path: of a chain all."""
    return tuple(token_ids[: Tree(parents).num_main_nodes] if parents else token_ids)


def likeliest_after(token_ids: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens of a draft's likeliest path after `path`; none where the draft has no such path."""
    if not parents:
        return tuple(token_ids[len(path) :]) if has_path(token_ids, parents, path) else ()
    nodes = nodes_along(token_ids, parents, path)
    if len(nodes) < len(path):
        return ()
    below, below_parents = Tree(parents).subtree(nodes[-1] if nodes else ROOT)
    return main_path([token_ids[node] for node in below], below_parents)


def tokens_on_path(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens of `nodes`; none where they are not a path from the root, as garbage may not be."""
    is_path = not nodes or (0 <= nodes[-1] < len(parents) and Tree(parents).path(nodes[-1]) == list(nodes))
    return tuple(token_ids[node] for node in nodes) if is_path else ()


def check_parents(parents: Sequence[int], token_ids: Sequence[int], max_nodes: int) -> None:
    """Raises `InvalidFieldError` naming `parents` unless they are a tree of `token_ids` with at most `max_nodes`
    nodes, no two of the same parent and token."""
    if len(parents) != len(token_ids):
        raise InvalidFieldError("parents", f"has {len(parents)} entries for {len(token_ids)} draft tokens")
    if len(parents) > max_nodes:
        at_most = f"at most {max_nodes} a round" if max_nodes else "this verifier takes no trees"
        raise InvalidFieldError("parents", f"{len(parents)} nodes; {at_most}")
    seen = set[tuple[int, int]]()
    for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True)):
        if not ROOT <= parent < node:
            raise InvalidFieldError("parents", f"[{node}] is {parent}; want -1 to {node - 1}")
        if (parent, token_id) in seen:
            raise InvalidFieldError("parents", f"[{node}] is a second {token_id} after node {parent}")
        seen.add((parent, token_id))
