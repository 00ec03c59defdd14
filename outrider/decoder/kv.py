"""Paged KV as other systems' schedulers ask for it: the engine's own block manager and prefix cache, in front of them
nothing but names."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud_verifier.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from outrider.cloud_verifier.security.metadata import DEFAULT_TENANT
from outrider.common.errors import UsageError

BLOCK_SIZE = 16  # tokens


class KVPool:
    """Hands out blocks of KV slots. `SpeculativeDecoder.kv_pool` is that of a target in this process.

    Blocks are held for a draft's tokens first; they become the sequence's own when the tokens are accepted.
    """

    def __init__(
        self, max_blocks: int, *, block_size: int = BLOCK_SIZE, manager: BlockManager | None = None
    ) -> None:
        """`manager` is a pool that there is already; then `max_blocks` and `block_size` are its own. Raises
        `UsageError` for sizes below 1."""
        if max_blocks < 1 or block_size < 1:
            raise UsageError(f"{max_blocks} KV blocks of {block_size} tokens", "want at least 1 of 1")
        self.manager = manager or BlockManager(max_blocks, block_size)
        self._held: set[BlockTable] = set()

    @property
    def num_free(self) -> int:
        """Returns how many blocks can be taken, cached ones included."""
        return self.manager.num_free

    def allocate(self, num_tokens: int) -> BlockTable:
        """Returns blocks for so many drafted tokens; `block_ids` lists them. Raises `UsageError`, and changes nothing,
        where too few are free."""
        if num_tokens < 1:
            raise UsageError(f"num_tokens is {num_tokens}", "want at least 1")
        blocks = self.manager.new_table(DEFAULT_TENANT)
        try:
            self.manager.reserve(blocks, num_tokens)
        except OutOfBlocks as error:
            self.manager.free(blocks)
            raise UsageError(str(error), "free others first, or make the pool larger") from error
        self._held.add(blocks)
        return blocks

    def promote(self, blocks: BlockTable, token_ids: Sequence[int] = ()) -> None:
        """Makes drafted tokens part of the sequence, as they were accepted. With the sequence's `token_ids`
        `PrefixCache` finds its full blocks from now on. Raises `UsageError` for blocks that were freed."""
        self._check(blocks)
        self.manager.append(blocks, blocks.num_reserved)
        self.manager.publish(blocks, token_ids)

    def free(self, blocks: BlockTable) -> None:
        """Gives blocks back; those of cached prefixes stay until others need the room. Raises `UsageError` for blocks
        that were freed."""
        self._check(blocks)
        self._held.remove(blocks)
        self.manager.free(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all counts agree."""
        self.manager.check_integrity()

    def _check(self, blocks: BlockTable) -> None:
        if blocks not in self._held:
            raise UsageError("these blocks were freed, or are another pool's")


class PrefixCache:
    """Finds the KV of earlier sequences in a pool."""

    def __init__(self, pool: KVPool) -> None:
        self._manager = pool.manager

    def match(self, prompt_tokens: Sequence[int]) -> list[int]:
        """Returns the blocks with the KV of the prompt's longest cached prefix, in whole blocks; none where nothing is
        known of it."""
        return self._manager.match(DEFAULT_TENANT, prompt_tokens)
