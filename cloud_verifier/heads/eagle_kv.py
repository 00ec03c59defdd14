"""The keys and values of an EAGLE draft's pairs, and the features that wait to become some."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

BLOCK = 256  # slots by which the KV grows


class EagleKv:
    """Holds one sequence's keys and values: those of pairs of real features by rising position, and after them those of
    a tree's nodes, which the next pairs overwrite. Positions may be left out where the features are not known."""

    def __init__(self) -> None:
        self.positions: list[int] = []  # of the pairs
        self._slots: Tensor | None = None  # [2, kv_heads, capacity, head_dim]

    @property
    def num_bytes(self) -> int:
        """Returns the size of what is allocated."""
        return 0 if self._slots is None else self._slots.nbytes

    def extend(self, start: int, own: Tensor) -> Tensor:
        """Writes [2, kv_heads, n, head_dim] to the slots from `start` on. Returns all up to their end, a view."""
        end = start + own.shape[2]
        capacity = 0 if self._slots is None else self._slots.shape[2]
        if end > capacity:
            grown = own.new_empty((*own.shape[:2], -(-end // BLOCK) * BLOCK, own.shape[3]))
            if self._slots is not None:
                grown[:, :, :start] = self._slots[:, :, :start]
            self._slots = grown
        assert self._slots is not None, "a slot was asked for"
        self._slots[:, :, start:end] = own
        return self._slots[:, :, :end]

    def truncate(self, num_positions: int) -> None:
        """Forgets the pairs at positions from `num_positions` on."""
        del self.positions[bisect_left(self.positions, num_positions) :]

    def check_integrity(self) -> None:
        """Asserts that positions rise and have slots."""
        assert self.positions == sorted(set(self.positions)), "positions do not rise"
        capacity = 0 if self._slots is None else self._slots.shape[2]
        assert len(self.positions) <= capacity, "more pairs than slots"


class WaitingStates:
    """Holds the states of features, fused, that are not in the KV yet, with the positions of their tokens."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._states: Tensor | None = None  # [len(positions), size]

    @property
    def num_bytes(self) -> int:
        """Returns their size."""
        return 0 if self._states is None else self._states.nbytes

    def num_before(self, position: int) -> int:
        """Returns how many are of tokens before `position`."""
        return bisect_left(self.positions, position)

    def append(self, start: int, states: Tensor, known: int) -> None:
        """Takes states [n, size] of the tokens from `start` on, but those before position `known`."""
        states = states[max(0, known - start) :]
        if not len(states):
            return
        start = max(start, known)
        self.positions += range(start, start + len(states))
        self._states = states if self._states is None else torch.cat((self._states, states))

    def take(self, count: int) -> tuple[list[int], Tensor]:
        """Returns the first `count` positions and states, which no longer wait."""
        assert self._states is not None and count <= len(self.positions), "more than wait"
        positions, states = self.positions[:count], self._states[:count]
        del self.positions[:count]
        self._states = self._states[count:].clone() if self.positions else None
        return positions, states

    def truncate(self, num_positions: int) -> None:
        """Forgets the states at positions from `num_positions` on."""
        count = self.num_before(num_positions)
        del self.positions[count:]
        self._states = None if self._states is None or not count else self._states[:count]
