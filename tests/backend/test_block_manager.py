"""Blocks as integers: allocation, sharing, copy-on-write, and a rule machine over all of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cloud_verifier.kv.blocks import BlockCopy, BlockManager, BlockTable, OutOfBlocks


def filled(manager: BlockManager, num_tokens: int) -> BlockTable:
    table = manager.new_table()
    manager.append(table, num_tokens)
    return table


def test_a_lone_sequence_grows_as_one_run_of_slots() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 5)
    manager.append(table, 6)
    assert table.block_ids == [0, 1, 2]
    assert manager.slots(table, 0, 11) == range(0, 11)
    assert manager.slots(table, 5, 11) == range(5, 11)


def test_a_second_sequence_starts_where_both_can_grow() -> None:
    manager = BlockManager(num_blocks=16, block_size=4)
    first, second = filled(manager, 4), filled(manager, 4)
    for _ in range(6):
        manager.append(first, 4)
        manager.append(second, 4)
    assert first.is_contiguous and second.is_contiguous
    manager.check_integrity()


def test_a_sequence_that_cannot_grow_in_place_goes_on_elsewhere() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    tables = [filled(manager, 2) for _ in range(3)]
    blocked = next(t for t in tables if any(u.block_ids[0] == t.block_ids[0] + 1 for u in tables))
    manager.append(blocked, 2)
    assert not blocked.is_contiguous
    first, second = blocked.block_ids
    assert list(manager.slots(blocked, 0, 4)) == [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]


def test_truncate_frees_whole_blocks_only() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 12)
    manager.truncate(table, 5)
    assert (table.length, len(table.block_ids), manager.num_free) == (5, 2, 6)
    manager.truncate(table, 0)
    assert manager.num_free == 8


def test_fork_shares_full_blocks_and_copies_the_partial_one_on_write() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 6)
    twin = manager.fork(table)
    assert manager.num_free == 6
    assert manager.append(twin, 1) == BlockCopy(source=1, destination=twin.block_ids[1])
    assert twin.block_ids[0] == table.block_ids[0]
    assert manager.append(table, 1) is None, "the original is alone in its last block again"
    manager.check_integrity()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 8)
    twin = manager.fork(table)
    assert manager.append(twin, 1) is None
    assert manager.append(table, 1) is None
    assert twin.block_ids[:2] == table.block_ids[:2] and twin.block_ids[2] != table.block_ids[2]


def test_truncating_into_a_shared_full_block_copies_it_on_the_next_write() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 8)
    twin = manager.fork(table)
    manager.truncate(twin, 6)
    copy = manager.append(twin, 1)
    assert copy is not None and copy.source == table.block_ids[1]


def test_running_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    table = filled(manager, 3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks needed, 1 free"):
        manager.append(table, 6)
    assert (table.length, table.block_ids, manager.num_free) == (3, [0], 1)
    manager.check_integrity()


def test_freeing_twice_does_nothing_and_a_freed_table_cannot_grow() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    table = filled(manager, 3)
    manager.free(table)
    manager.free(table)
    assert manager.num_free == 2
    with pytest.raises(AssertionError, match="freed"):
        manager.append(table, 1)


class BlockMachine(RuleBasedStateMachine):
    """Every slot holds the token last written to it; each table must read back its own text."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=3)
        self.memory = [-1] * 36
        self.texts: dict[BlockTable, list[int]] = {}
        self.next_token = 0

    @rule(target=tables)
    def create(self) -> BlockTable:
        table = self.manager.new_table()
        self.texts[table] = []
        return table

    @rule(table=tables, num_tokens=st.integers(0, 10))
    def append(self, table: BlockTable, num_tokens: int) -> None:
        before = (table.length, list(table.block_ids), self.manager.num_free)
        num_needed = self.manager.num_blocks_needed(table, num_tokens)
        try:
            copy = self.manager.append(table, num_tokens)
        except OutOfBlocks:
            assert num_needed > before[2]
            assert (table.length, table.block_ids, self.manager.num_free) == before
            return
        assert before[2] - self.manager.num_free == num_needed
        if copy is not None:
            source, destination = 3 * copy.source, 3 * copy.destination
            self.memory[destination : destination + 3] = self.memory[source : source + 3]
        for slot in self.manager.slots(table, before[0], table.length):
            self.memory[slot] = self.next_token
            self.texts[table].append(self.next_token)
            self.next_token += 1

    @rule(table=tables, data=st.data())
    def truncate(self, table: BlockTable, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, table.length))
        self.manager.truncate(table, length)
        del self.texts[table][length:]

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        twin = self.manager.fork(table)
        self.texts[twin] = list(self.texts[table])
        return twin

    @rule(table=consumes(tables))
    def free(self, table: BlockTable) -> None:
        self.manager.free(table)
        del self.texts[table]

    @invariant()
    def bookkeeping_is_sound_and_texts_are_intact(self) -> None:
        self.manager.check_integrity()
        for table, text in self.texts.items():
            assert [self.memory[slot] for slot in self.manager.slots(table, 0, table.length)] == text


BlockMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = BlockMachine.TestCase
