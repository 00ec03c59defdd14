"""The keys and values of an EAGLE draft's pairs, and the features that wait to become some."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.edge_client.drafting.spec import HIDDEN

BLOCK = 256  # slots by which the KV grows


class EagleKv:
    """Holds one sequence's keys and values: those of pairs of real features by rising position. Positions may be left
    out where the features are not known."""

    def __init__(self) -> None:
        self.positions: list[int] = []  # of the pairs
        self._slots: Tensor | None = None  # [2, kv_heads, capacity, head_dim]

    @property
    def num_bytes(self) -> int:
        """Returns the size of what is allocated."""
        return 0 if self._slots is None else self._slots.nbytes

    @property
    def pairs(self) -> Tensor | None:
        """Returns the KV [2, kv_heads, pairs, head_dim], a view; None before the first."""
        return None if self._slots is None else self._slots[:, :, : len(self.positions)]

    def append(self, positions: Sequence[int], own: Tensor) -> None:
        """Adds pairs [2, kv_heads, n, head_dim]."""
        start = len(self.positions)
        end = start + own.shape[2]
        self._slots = _with_room(self._slots, own, start, end)
        self._slots[:, :, start:end] = own
        self.positions += positions

    def truncate(self, num_positions: int) -> None:
        """Forgets the pairs at positions from `num_positions` on."""
        del self.positions[bisect_left(self.positions, num_positions) :]

    def check_integrity(self) -> None:
        """Asserts that positions rise and have slots."""
        assert self.positions == sorted(set(self.positions)), "positions do not rise"
        capacity = 0 if self._slots is None else self._slots.shape[2]
        assert len(self.positions) <= capacity, "more pairs than slots"


class RunKv:
    """Holds the keys and values of several sequences side by side for one run, in columns: their pairs, each padded to
    the longest, and after them what is computed in the run."""

    def __init__(self, kept: Sequence[EagleKv], device: torch.device, dtype: torch.dtype) -> None:
        self._kept = [each.pairs for each in kept]
        self._device, self._dtype = device, dtype
        self._slots: Tensor | None = None  # [2, sequences, kv_heads, capacity, head_dim]
        self.end = max(len(each.positions) for each in kept)  # columns in use
        self.bias = self._bias_of([len(each.positions) for each in kept], self.end)
        """[sequences, 1, columns]: hides what is padded, in the columns that every later one sees."""

    def extend(self, own: Tensor) -> Tensor:
        """Adds columns [2, sequences, kv_heads, n, head_dim]. Returns all, a view."""
        end = self.end + own.shape[3]
        is_first = self._slots is None
        self._slots = _with_room(self._slots, own, self.end, end)
        for number, pairs in enumerate(self._kept if is_first else ()):
            if pairs is not None:
                self._slots[:, number, :, : pairs.shape[2]] = pairs
        self._slots[..., self.end : end, :] = own
        self.end = end
        return self._slots[..., :end, :]

    def last(self, num_columns: int) -> Tensor:
        """Returns the last columns, a view."""
        assert self._slots is not None, "columns were added"
        return self._slots[..., self.end - num_columns : self.end, :]

    def show(self, counts: Sequence[int]) -> None:
        """Shows the columns that were added to every later one, so many of each sequence."""
        num_added = self.end - self.bias.shape[2]
        self.bias = torch.cat((self.bias, self._bias_of(counts, num_added)), dim=2)

    def _bias_of(self, counts: Sequence[int], num_columns: int) -> Tensor:
        is_padded = np.arange(num_columns) >= np.array(counts)[:, None, None]
        return torch.from_numpy(np.where(is_padded, np.float32(HIDDEN), np.float32(0))).to(
            self._device, self._dtype
        )


def _with_room(slots: Tensor | None, own: Tensor, start: int, end: int) -> Tensor:
    """Returns slots [*, capacity, head_dim] with room up to `end`, those before `start` kept; new ones are zeros, which
    are numbers where they are hidden."""
    capacity = 0 if slots is None else slots.shape[-2]
    if slots is not None and end <= capacity:
        return slots
    grown = own.new_zeros((*own.shape[:-2], -(-end // BLOCK) * BLOCK, own.shape[-1]))
    if slots is not None:
        grown[..., :start, :] = slots[..., :start, :]
    return grown


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
