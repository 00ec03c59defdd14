"""What is done with the KV pools beside a forward's own writes: tokens of a tree move, shared blocks are copied.

On a device the slots of these go up with the next forward's inputs, and the pools are changed before it writes. So
nothing may read the pools but a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from outrider.cloud_verifier.kv.blocks import BlockCopy

Upload = Callable[[Sequence[int]], torch.Tensor]  # integers → int64 on the device


class PoolChanges:
    """Collects changes and makes them together: first moves, then copies, then what is cleared.

    That is their order, too, or makes no difference: slots move inside the sequence that wrote them last, blocks are
    copied and taken by the next forward.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._destinations: list[int] = []
        self._sources: list[int] = []
        self._copies: list[BlockCopy] = []
        self._cleared: list[int] = []
        self._moves: tuple[torch.Tensor, torch.Tensor] | None = None  # once staged, as the next
        self._blocks: torch.Tensor | None = None

    def move(self, destinations: Iterable[int], sources: Iterable[int]) -> None:
        """Has each of the tokens in these slots moved to the slot of its number."""
        self._destinations += destinations
        self._sources += sources

    def copy(self, copy: BlockCopy | None) -> None:
        """Has a block copied, if one is to be."""
        if copy is not None:
            self._copies.append(copy)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Has blocks set to zero, in place of those of a forward that failed: which it had taken."""
        self._cleared = [*block_ids]

    def stage(self, upload: Upload) -> None:
        """Sends the slots to the device; `make` is called when they are there."""
        moves = self._destinations, self._sources
        self._moves = (upload(moves[0]), upload(moves[1])) if self._sources else None
        self._blocks = upload(self._cleared) if self._cleared else None

    def make(self, pools: Iterable[torch.Tensor]) -> None:
        """Changes pools [layers, num_blocks, block_size, kv_heads, head_dim]."""
        for pool in pools:
            if self._moves is not None:
                destinations, sources = self._moves
                slots = pool.flatten(1, 2)  # a view
                slots.index_copy_(1, destinations, slots.index_select(1, sources))
            for copy in self._copies:
                pool[:, copy.destination] = pool[:, copy.source]
            if self._blocks is not None:
                pool.index_fill_(1, self._blocks, 0.0)
        self._forget()
