"""The prefix cache's index: a trie per tenant, with the tokens of one block on each branch.

Only blocks that are equal token for token from the first token on are found; no hash is trusted. Blocks held
by no table stay registered; the least recently used is evicted first, and with it those that continue it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Edge = tuple[str, tuple[int, ...]]  # tenant, the block's own tokens


@dataclass(eq=False, slots=True)
class PrefixNode:
    """Holds a registered block: KV of its tokens after those of all nodes above it."""

    block_id: int
    edge: Edge
    parent: PrefixNode | None  # None: the root, which is no block
    children: dict[Edge, PrefixNode] = field(default_factory=dict)


class PrefixIndex:
    """Finds registered blocks by their tokens, and orders those held by no table for eviction."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = PrefixNode(-1, ("", ()), None)
        self._nodes: dict[int, PrefixNode] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by no table, least recently used first

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    @property
    def num_idle(self) -> int:
        """Returns the number of registered blocks held by no table."""
        return len(self._idle)

    @property
    def registered_blocks(self) -> frozenset[int]:
        """Returns the blocks whose tokens can be found, held or idle."""
        return frozenset(self._nodes)

    @property
    def idle_blocks(self) -> frozenset[int]:
        """Returns the registered blocks held by no table."""
        return frozenset(self._idle)

    def match(self, tenant: str, token_ids: Sequence[int]) -> list[int]:
        """Returns the blocks of the longest registered prefix of `token_ids`, in whole blocks."""
        size, node, found = self._block_size, self._root, []
        for start in range(0, len(token_ids) - size + 1, size):
            child = node.children.get((tenant, tuple(token_ids[start : start + size])))
            if child is None:
                break
            found.append(child.block_id)
            node = child
        return found

    def register(self, tenant: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Registers `block_ids`, KV of `token_ids`; returns for each the block that is found from now on.

        That is another one where the same tokens were registered before.
        """
        size, node, found = self._block_size, self._root, []
        for index, block_id in enumerate(block_ids):
            edge = (tenant, tuple(token_ids[index * size : (index + 1) * size]))
            child = node.children.get(edge)
            if child is None:
                assert block_id not in self._nodes, "this block is registered as KV of other tokens"
                child = node.children[edge] = self._nodes[block_id] = PrefixNode(block_id, edge, node)
            found.append(child.block_id)
            node = child
        return found

    def set_idle(self, block_id: int) -> None:
        """Marks a registered block as held by no table."""
        self._idle[block_id] = None

    def set_held(self, block_id: int) -> None:
        """Marks a block as held by a table."""
        self._idle.pop(block_id, None)

    def oldest_idle(self) -> int:
        """Returns the idle block that was released longest ago."""
        return next(iter(self._idle))

    def drop(self, block_id: int) -> list[int]:
        """Removes a block and every block after it; returns those of them that were idle."""
        top = self._nodes[block_id]
        assert top.parent is not None, "the root is no block"
        del top.parent.children[top.edge]
        stack, freed = [top], []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            del self._nodes[node.block_id]
            if node.block_id in self._idle:
                del self._idle[node.block_id]
                freed.append(node.block_id)
        return freed

    def check_integrity(self) -> None:
        """Raises AssertionError unless the trie and the look-up tables agree."""
        stack, seen = [self._root], set()
        while stack:
            node = stack.pop()
            for edge, child in node.children.items():
                assert child.parent is node and child.edge == edge, "a node hangs in the wrong place"
                assert len(edge[1]) == self._block_size, "a partly filled block is registered"
                assert self._nodes.get(child.block_id) is child, "a node's block is not its own"
                seen.add(child.block_id)
                stack.append(child)
        assert seen == set(self._nodes), "a registered block is out of reach"
        assert set(self._idle) <= seen, "an idle block is not registered"
