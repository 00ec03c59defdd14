"""Paged KV as pure integers: which sequence owns which block, and how often it is shared.

A pool has `num_blocks` blocks of `block_size` token slots. A `BlockTable` lists one sequence's blocks in
order; token i of the sequence is in slot `block_ids[i // block_size] * block_size + i % block_size`. Blocks
are reference-counted: sequences that begin alike share them, and the first append into a shared block that its sequence
had cut moves that sequence to a copy of its own (copy-on-write).

A block is empty, held by at least one table, or idle: held by none and still registered in the prefix cache
(`kv.prefixes`), where the next table with the same tokens finds it. Idle blocks count as free and are taken,
least recently used first, when no empty one is left.

The block after a sequence's last one is preferred, and a new run starts where there is most room to grow, so
that a sequence is usually one run of slots: attention on a CPU then views the pool instead of gathering.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.cloud_verifier.kv.prefixes import PrefixIndex

MAX_GAPS = 64  # looked at for a new run: a pool in crumbs costs no more than a tidy one


class OutOfBlocks(Exception):
    """The pool has too few free blocks; nothing was changed."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} KV blocks needed, {num_free} free")
        self.num_needed = num_needed
        self.num_free = num_free


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Orders a copy of block `source` to `destination` in every layer's pool before the next write."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Counts a pool's blocks: held by tables, registered in the prefix cache alone, empty."""

    block_size: int
    num_used: int
    num_cached: int
    num_empty: int
    num_evicted: int  # cached blocks given up for new text; only rises
    num_peak: int = 0  # most that tables held at once so far

    @property
    def peak_share(self) -> float:
        """Returns the most that was held at once, as a share of the pool."""
        return self.num_peak / (self.num_used + self.num_cached + self.num_empty)


@dataclass(eq=False, slots=True)
class BlockTable:
    """Lists one sequence's blocks. Only `BlockManager` writes to it."""

    tenant: str = ""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    num_leading: int = 0  # blocks at the front that follow one another in the pool
    num_reserved: int = 0  # tokens after the length whose slots are held

    @property
    def is_contiguous(self) -> bool:
        """Returns whether all blocks follow one another in the pool."""
        return self.num_leading == len(self.block_ids)


class BlockManager:
    """Allocates, shares and frees blocks. Not thread-safe: it belongs to the engine."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one slot, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._is_taken = bytearray(num_blocks)  # 1: held or idle
        self._num_empty = num_blocks
        self._num_evicted = 0
        self._least_free = num_blocks  # so far
        self._prefixes = PrefixIndex(block_size)
        self._tables: set[BlockTable] = set()

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that can be taken: empty and idle ones."""
        return self._num_empty + self._prefixes.num_idle

    @property
    def usage(self) -> BlockUsage:
        """Returns counts for any thread; a block that is being moved may be counted wrongly."""
        num_empty, num_cached = self._num_empty, self._prefixes.num_idle
        num_used = self.num_blocks - num_empty - num_cached
        num_peak = self.num_blocks - self._least_free
        return BlockUsage(self.block_size, num_used, num_cached, num_empty, self._num_evicted, num_peak)

    @property
    def num_idle(self) -> int:
        """Returns the number of blocks registered in the prefix cache and held by no table."""
        return self._prefixes.num_idle

    def match(self, tenant: str, token_ids: Sequence[int]) -> list[int]:
        """Returns the blocks of the tenant's longest cached prefix of `token_ids`, in whole blocks; holds none."""
        return self._prefixes.match(tenant, token_ids)

    def new_table(self, tenant: str = "", token_ids: Sequence[int] = ()) -> BlockTable:
        """Returns a table with the tenant's cached blocks of `token_ids`, for all but the last token at most."""
        table = BlockTable(tenant)
        for block_id in self.match(tenant, token_ids[: max(0, len(token_ids) - 1)]):
            self._hold(block_id)
            self._push(table, block_id)
        table.length = len(table.block_ids) * self.block_size
        self._tables.add(table)
        self._least_free = min(self._least_free, self.num_free)
        return table

    def publish(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        """Registers the table's full blocks, KV of `token_ids`, so that `new_table` finds them.

        Where another block with the same tokens is registered already, the table takes that one.
        """
        self._check_owned(table)
        num_full = min(table.length, len(token_ids)) // self.block_size
        found = self._prefixes.register(table.tenant, token_ids, table.block_ids[:num_full])
        if found == table.block_ids[:num_full].tolist():
            return
        # Hold all before releasing any: a block released meanwhile must not take others with it.
        for block_id in found:
            self._hold(block_id)
        block_ids = found + table.block_ids[num_full:].tolist()
        for block_id in reversed(table.block_ids[:num_full]):
            self._release(block_id)
        del table.block_ids[:]
        table.num_leading = 0
        for block_id in block_ids:
            self._push(table, block_id)

    def unpublish(self, table: BlockTable) -> None:
        """Removes the table's blocks, and those that continue them, from the prefix cache."""
        for block_id in table.block_ids:
            if block_id in self._prefixes:
                self._drop(block_id)

    def num_blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Returns the number of free blocks that `append(table, num_tokens)` would take."""
        if num_tokens == 0:
            return 0
        num_held = len(table.block_ids)
        num_after = -(-(table.length + num_tokens) // self.block_size)
        return max(0, num_after - num_held) + int(self._must_copy_last(table))

    def append(self, table: BlockTable, num_tokens: int) -> BlockCopy | None:
        """Makes room for `num_tokens` more tokens and advances the length.

        Returns the copy to do first when the last block was shared. Raises `OutOfBlocks`, changing nothing.
        """
        self._check_owned(table)
        assert num_tokens >= 0, "cannot append a negative number of tokens"
        num_needed, num_free = self.num_blocks_needed(table, num_tokens), self.num_free
        if num_needed > num_free:
            raise OutOfBlocks(num_needed, num_free)
        copy = None
        if num_tokens and self._must_copy_last(table):
            source = self._pop(table)
            # The source stays: another table holds it, or it would not have been shared.
            self._push(table, self._take_after(table))
            self._ref_counts[source] -= 1
            copy = BlockCopy(source, table.block_ids[-1])
        elif num_tokens and table.length % self.block_size and table.block_ids[-1] in self._prefixes:
            self._drop(table.block_ids[-1])  # its tail is about to be overwritten
        table.length += num_tokens
        table.num_reserved = max(0, table.num_reserved - num_tokens)
        if num_needed:
            while len(table.block_ids) * self.block_size < table.length:
                self._push(table, self._take_after(table))
            self._least_free = min(self._least_free, self.num_free)
        return copy

    def reserve(self, table: BlockTable, num_tokens: int) -> BlockCopy | None:
        """Holds the slots of the next `num_tokens` tokens, until they are appended or the table is truncated.

        Returns and raises what `append` does.
        """
        copy = self.append(table, num_tokens)
        table.length -= num_tokens
        table.num_reserved += num_tokens
        return copy

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keeps the first `length` tokens; whole blocks beyond them are released, reserved ones too."""
        self._check_owned(table)
        assert 0 <= length <= table.length, f"cannot truncate {table.length} tokens to {length}"
        num_kept = -(-length // self.block_size)
        while len(table.block_ids) > num_kept:
            self._release(self._pop(table))
        table.length, table.num_reserved = length, 0

    def free(self, table: BlockTable) -> None:
        """Releases a sequence; its table must not be used again. Freeing twice does nothing."""
        if table in self._tables:
            self.truncate(table, 0)
            self._tables.remove(table)

    def slots(self, table: BlockTable, start: int, stop: int) -> Iterable[int]:
        """Returns the pool slots of tokens start … stop−1, reserved ones too (a `range` when the blocks follow one
        another)."""
        assert 0 <= start <= stop <= table.length + table.num_reserved, "slots outside the sequence"
        size, block_ids = self.block_size, table.block_ids
        if start == stop:
            return range(0)
        if table.is_contiguous or start // size == (stop - 1) // size:
            first = block_ids[start // size] * size + start % size
            return range(first, first + stop - start)
        return [block_ids[i // size] * size + i % size for i in range(start, stop)]

    def release_reserved(self, table: BlockTable) -> None:
        """Gives back what was reserved and not appended; does nothing for a table that was freed."""
        if table in self._tables:
            self.truncate(table, table.length)

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts, lengths and free blocks all agree."""
        holders: Counter[int] = Counter()
        for table in self._tables:
            expected = -(-(table.length + table.num_reserved) // self.block_size)
            assert len(table.block_ids) == expected, "a table holds too few or too many blocks"
            assert len(set(table.block_ids)) == len(table.block_ids), "a table lists a block twice"
            pairs = zip(table.block_ids, table.block_ids[1:], strict=False)
            breaks = (i for i, (a, b) in enumerate(pairs, 1) if b != a + 1)
            assert table.num_leading == next(breaks, len(table.block_ids)), "num_leading is wrong"
            holders.update(table.block_ids)
        # Most blocks are empty: they are counted, not looked at one by one.
        assert all(self._ref_counts[block_id] == count for block_id, count in holders.items()) and (
            self._ref_counts.count(0) == self.num_blocks - len(holders)
        ), "reference counts differ from the tables"
        self._prefixes.check_integrity()
        idle = self._prefixes.idle_blocks
        assert not idle & holders.keys(), "a block is idle and held"
        taken = idle | holders.keys()
        assert self._prefixes.registered_blocks <= taken, "a registered block is empty"
        assert all(self._is_taken[block_id] for block_id in taken) and (
            self._is_taken.count(1) == len(taken)
        ), "a block is taken and empty"
        assert self._num_empty == self._is_taken.count(0), "the number of empty blocks is wrong"

    # ------------------------------------------------------------------------------ one block

    def _check_owned(self, table: BlockTable) -> None:
        assert table in self._tables, "this block table was freed, or belongs to another manager"

    def _must_copy_last(self, table: BlockTable) -> bool:
        """Returns whether the next token would be written into a block that another sequence also reads."""
        return table.length % self.block_size != 0 and self._ref_counts[table.block_ids[-1]] > 1

    def _push(self, table: BlockTable, block_id: int) -> None:
        block_ids = table.block_ids
        if table.is_contiguous and (not block_ids or block_id == block_ids[-1] + 1):
            table.num_leading += 1
        block_ids.append(block_id)

    def _pop(self, table: BlockTable) -> int:
        block_id = table.block_ids.pop()
        table.num_leading = min(table.num_leading, len(table.block_ids))
        return block_id

    def _hold(self, block_id: int) -> None:
        self._prefixes.set_held(block_id)
        self._ref_counts[block_id] += 1

    def _release(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id in self._prefixes:
                self._prefixes.set_idle(block_id)
            else:
                self._set_empty(block_id)

    def _drop(self, block_id: int) -> None:
        """Removes a block from the prefix cache, and with it those that continue it."""
        for freed in self._prefixes.drop(block_id):
            self._set_empty(freed)

    def _set_empty(self, block_id: int) -> None:
        self._is_taken[block_id] = 0
        self._num_empty += 1

    def _take_after(self, table: BlockTable) -> int:
        """Takes the block that follows the table's last one, else the start of a new run."""
        assert self.num_free > 0, "blocks are counted before they are taken"
        if self._num_empty == 0:
            self._drop(self._prefixes.oldest_idle())
            self._num_evicted += self._num_empty
        block_id = table.block_ids[-1] + 1 if table.block_ids else self.num_blocks
        if block_id >= self.num_blocks or self._is_taken[block_id]:
            block_id = self._roomiest()
        self._ref_counts[block_id] = 1
        self._is_taken[block_id] = 1
        self._num_empty -= 1
        return block_id

    def _roomiest(self) -> int:
        """Returns where a new run can grow furthest: half-way into the longest gap after another run.

        The front half stays for the run before the gap; a gap at the front of the pool has no such run.
        """
        best_start, best_length, stop = 0, 0, 0
        for _ in range(MAX_GAPS):
            start = self._is_taken.find(0, stop)
            if start < 0:
                break
            stop = self._is_taken.find(1, start)
            stop = self.num_blocks if stop < 0 else stop
            if stop - start > best_length:
                best_start, best_length = start, stop - start
        return best_start if best_start == 0 else best_start + best_length // 2
