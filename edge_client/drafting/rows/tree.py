"""Keeps where the KV of a tree's nodes is, for a draft that feeds several of them in one run.

    slots  [ committed tokens … | nodes, in the order in which they were fed ]

A node is fed at the position after its path and sees the committed tokens and its own path; the attention bias hides
the other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.common.types import TokenIds
from outrider.edge_client.drafting.spec import HIDDEN


class TreeKv:
    """Keeps where the KV of nodes is: by path, the slot of its last token. Slots rise along a path."""

    def __init__(self, start: int) -> None:
        self.start = start  # committed tokens, which come before every path
        self.end = start  # slots in use
        self._slots: dict[TokenIds, tuple[int, ...]] = {(): ()}  # of all tokens of the path

    def add(self, paths: Sequence[TokenIds]) -> NDArray[np.float32]:
        """Gives each path's last token the next slot. Returns the attention bias of their run
        [n, slots from `start` on]."""
        first = self.end
        self.end += len(paths)
        bias = np.full((len(paths), self.end - self.start), HIDDEN, np.float32)
        for row, path in enumerate(paths):
            slots = self._slots[path] = (*self._slots[path[:-1]], first + row)
            bias[row, [slot - self.start for slot in slots]] = 0
        return bias

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the slots of the longest path that begins `token_ids`."""
        path = tuple(token_ids)
        return next(self._slots[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._slots)

    def descend(self, path: TokenIds) -> None:
        """Forgets all nodes but those after `path`, whose KV is now before `start`."""
        self.start += len(path)
        below = {
            key[len(path) :]: slots[len(path) :]
            for key, slots in self._slots.items()
            if key[: len(path)] == path
        }
        self._slots = below

    def check_integrity(self) -> None:
        """Asserts that each path has its own slot, after those of its beginning."""
        last = [slots[-1] for slots in self._slots.values() if slots]
        assert len(set(last)) == len(last), "two nodes share a slot"
        for path, slots in self._slots.items():
            assert len(slots) == len(path) and list(slots) == sorted(slots), "a node comes before its parent"
            assert not slots or self._slots[path[:-1]] == slots[:-1], "a path is not its beginning's"
            assert not slots or (self.start <= slots[0] and slots[-1] < self.end), "a node has no room"
