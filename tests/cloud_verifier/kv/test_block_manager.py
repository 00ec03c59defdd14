"""Blocks as integers: allocation, sharing, copy-on-write, the prefix cache, and a rule machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from outrider.cloud_verifier.kv.blocks import BlockCopy, BlockManager, BlockTable, OutOfBlocks


def filled(manager: BlockManager, num_tokens: int) -> BlockTable:
    table = manager.new_table()
    manager.append(table, num_tokens)
    return table


def test_a_lone_sequence_grows_as_one_run_of_slots() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = filled(manager, 5)
    manager.append(table, 6)
    assert [*table.block_ids] == [0, 1, 2]
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


def test_reserved_slots_are_held_until_they_are_appended_or_the_sequence_is_cut() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    table = filled(manager, 3)
    assert manager.reserve(table, 6) is None
    assert (table.length, [*table.block_ids], manager.num_free) == (3, [0, 1, 2], 1)
    assert manager.slots(table, 3, 9) == range(3, 9)
    with pytest.raises(OutOfBlocks):
        manager.reserve(table, 14)
    manager.append(table, 4)
    assert (table.length, table.num_reserved, manager.num_free) == (7, 2, 1)
    manager.check_integrity()
    manager.truncate(table, 5)
    assert ([*table.block_ids], table.num_reserved, manager.num_free) == ([0, 1], 0, 2)
    manager.reserve(table, 8)
    manager.release_reserved(table)
    assert (table.length, manager.num_free) == (5, 2)
    manager.free(table)
    manager.release_reserved(table)
    manager.check_integrity()


TWO_BLOCKS = range(8)


def twins(manager: BlockManager) -> tuple[BlockTable, BlockTable]:
    """Two tables that share two blocks of four, by the prefix cache."""
    table = filled(manager, 8)
    manager.publish(table, TWO_BLOCKS)
    twin = manager.new_table("", [*TWO_BLOCKS, 8])
    assert twin.block_ids == table.block_ids
    return table, twin


def test_reserving_in_a_shared_block_copies_it() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table, twin = twins(manager)
    manager.truncate(twin, 6)
    assert manager.reserve(twin, 1) == BlockCopy(table.block_ids[1], twin.block_ids[1])
    assert manager.append(twin, 1) is None


def test_full_blocks_stay_shared_and_one_that_both_cut_is_copied_by_the_first_to_write() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table, twin = twins(manager)
    assert manager.num_free == 6
    for each in (table, twin):
        manager.truncate(each, 6)
    assert manager.append(twin, 1) == BlockCopy(source=1, destination=twin.block_ids[1])
    assert twin.block_ids[0] == table.block_ids[0]
    assert manager.append(table, 1) is None, "the original is alone in its last block again"
    manager.check_integrity()


def test_sequences_that_share_whole_blocks_copy_nothing() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table, twin = twins(manager)
    assert manager.append(twin, 1) is None
    assert manager.append(table, 1) is None
    assert twin.block_ids[:2] == table.block_ids[:2] and twin.block_ids[2] != table.block_ids[2]


def test_truncating_into_a_shared_full_block_copies_it_on_the_next_write() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table, twin = twins(manager)
    manager.truncate(twin, 6)
    copy = manager.append(twin, 1)
    assert copy is not None and copy.source == table.block_ids[1]


def test_running_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    table = filled(manager, 3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks needed, 1 free"):
        manager.append(table, 6)
    assert (table.length, [*table.block_ids], manager.num_free) == (3, [0], 1)
    manager.check_integrity()


def test_freeing_twice_does_nothing_and_a_freed_table_cannot_grow() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    table = filled(manager, 3)
    manager.free(table)
    manager.free(table)
    assert manager.num_free == 2
    with pytest.raises(AssertionError, match="freed"):
        manager.append(table, 1)


def published(manager: BlockManager, tenant: str, text: list[int]) -> BlockTable:
    """A table that computed `text`, and told the cache."""
    table = manager.new_table(tenant, text)
    manager.append(table, len(text) - table.length)
    manager.publish(table, text)
    return table


def test_a_published_prefix_is_found_in_whole_blocks_and_never_to_its_last_token() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = published(manager, "a", list(range(10)))
    again = manager.new_table("a", list(range(10)))
    assert (again.length, again.block_ids) == (8, table.block_ids[:2])
    assert manager.new_table("a", list(range(8))).length == 4, "one token is left to feed"
    assert manager.new_table("a", [0, 1, 2, 3, 4, 5, 6, 9, 9]).length == 4
    assert manager.new_table("a", [9, 1, 2, 3, 4, 5, 6, 7, 8]).length == 0
    assert manager.new_table("a", []).length == 0
    manager.check_integrity()


def test_tenants_never_share() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    published(manager, "a", list(range(9)))
    assert manager.new_table("b", list(range(9))).length == 0


def test_an_equal_block_is_found_only_behind_the_same_text() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    published(manager, "a", [1, 1, 7, 7, 5])
    assert manager.new_table("a", [2, 2, 7, 7, 5]).length == 0
    assert manager.new_table("a", [7, 7, 5]).length == 0


def test_blocks_nobody_holds_count_as_free_and_the_least_recently_used_go_first() -> None:
    manager = BlockManager(num_blocks=6, block_size=2)
    old, new = published(manager, "a", [1] * 4), published(manager, "a", [2] * 4)
    manager.free(old)
    manager.free(new)
    assert (manager.num_free, manager.num_idle) == (6, 4)
    manager.free(manager.new_table("a", [1] * 5))  # the first text is used once more
    other = filled(manager, 8)
    assert manager.new_table("a", [2] * 5).length == 0
    assert manager.new_table("a", [1] * 5).length == 4
    manager.free(other)
    manager.check_integrity()


def test_of_an_idle_text_the_end_goes_before_the_beginning() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    manager.free(published(manager, "a", list(range(8))))
    filled(manager, 2)
    assert manager.new_table("a", list(range(9))).length == 6


def test_two_tables_that_computed_the_same_text_share_it_once_both_are_published() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    first, second = filled(manager, 5), filled(manager, 5)
    manager.publish(first, [1, 2, 3, 4, 5])
    manager.publish(second, [1, 2, 3, 4, 5])
    assert second.block_ids[:2] == first.block_ids[:2] and second.block_ids[2] != first.block_ids[2]
    assert manager.num_free == 4
    manager.check_integrity()


def test_rewriting_a_published_block_takes_it_and_what_follows_out_of_the_cache() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = published(manager, "a", [1, 2, 3, 4, 5, 6])
    manager.truncate(table, 3)
    assert manager.num_idle == 1, "the third block is still known"
    assert manager.append(table, 1) is None, "the block is its own: nothing to copy"
    assert manager.num_idle == 0
    assert manager.new_table("a", [1, 2, 3, 4, 5, 6, 7]).length == 2
    manager.check_integrity()


def test_rewriting_a_block_that_another_found_leaves_that_one_as_it_was() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = published(manager, "a", [1, 2, 3, 4])
    reader = manager.new_table("a", [1, 2, 3, 4, 5])
    manager.truncate(table, 3)
    copy = manager.append(table, 1)
    assert copy is not None and copy.source == reader.block_ids[1]
    assert manager.new_table("a", [1, 2, 3, 4, 5]).length == 4
    manager.check_integrity()


class BlockMachine(RuleBasedStateMachine):
    """Every slot holds the tenant and the whole text it is KV of; each table must read back its own."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=3)
        self.memory: list[tuple[str, tuple[int, ...]] | None] = [None] * 36
        self.texts: dict[BlockTable, list[int]] = {}
        self.published: list[list[int]] = [[]]

    @rule(target=tables, tenant=st.sampled_from("ab"), data=st.data())
    def create(self, tenant: str, data: st.DataObject) -> BlockTable:
        text = data.draw(st.sampled_from(self.published))
        num_free = self.manager.num_free
        table = self.manager.new_table(tenant, text)
        assert table.length % 3 == 0 and table.length <= max(0, len(text) - 1)
        assert num_free - len(table.block_ids) <= self.manager.num_free <= num_free
        self.texts[table] = text[: table.length]
        return table

    @rule(table=tables, tokens=st.lists(st.integers(0, 1), max_size=10))
    def append(self, table: BlockTable, tokens: list[int]) -> None:
        before = (table.length, list(table.block_ids), self.manager.num_free)
        num_needed = self.manager.num_blocks_needed(table, len(tokens))
        try:
            copy = self.manager.append(table, len(tokens))
        except OutOfBlocks:
            assert num_needed > before[2]
            assert (table.length, list(table.block_ids), self.manager.num_free) == before
            return
        assert before[2] - self.manager.num_free == num_needed
        if copy is not None:
            source, destination = 3 * copy.source, 3 * copy.destination
            self.memory[destination : destination + 3] = self.memory[source : source + 3]
        text = self.texts[table]
        for slot, token in zip(self.manager.slots(table, before[0], table.length), tokens, strict=True):
            text.append(token)
            self.memory[slot] = (table.tenant, tuple(text))

    @rule(table=tables, num_tokens=st.integers(0, 7))
    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Something is written to the slots after the text, which nobody is to read."""
        num_free, num_needed = self.manager.num_free, self.manager.num_blocks_needed(table, num_tokens)
        try:
            copy = self.manager.reserve(table, num_tokens)
        except OutOfBlocks:
            assert num_needed > num_free == self.manager.num_free
            return
        if copy is not None:
            source, destination = 3 * copy.source, 3 * copy.destination
            self.memory[destination : destination + 3] = self.memory[source : source + 3]
        assert self.manager.num_blocks_needed(table, num_tokens) == 0
        for slot in self.manager.slots(table, table.length, table.length + num_tokens):
            self.memory[slot] = None

    @rule(table=tables)
    def release_reserved(self, table: BlockTable) -> None:
        self.manager.release_reserved(table)
        assert len(table.block_ids) == -(-table.length // 3)

    @rule(table=tables, data=st.data())
    def truncate(self, table: BlockTable, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, table.length))
        self.manager.truncate(table, length)
        del self.texts[table][length:]

    @rule(target=tables, table=tables, data=st.data())
    def share(self, table: BlockTable, data: st.DataObject) -> BlockTable:
        """Makes a second table of the same blocks, whose last one may be cut."""
        text = self.texts[table]
        self.published.append([*text, 0])
        self.manager.publish(table, text)
        twin = self.manager.new_table(table.tenant, self.published[-1])
        assert twin.block_ids == table.block_ids[: table.length // 3]
        self.manager.truncate(twin, data.draw(st.integers(0, twin.length)))
        self.texts[twin] = text[: twin.length]
        return twin

    @rule(table=tables, extra=st.lists(st.integers(0, 1), max_size=4))
    def publish(self, table: BlockTable, extra: list[int]) -> None:
        """The caller's text may be longer than what the table holds of it."""
        self.published.append([*self.texts[table], *extra])
        self.manager.publish(table, self.published[-1])
        if table.length % 3:
            found = self.manager.new_table(table.tenant, self.texts[table])
            assert found.block_ids == table.block_ids[: table.length // 3], "what was published is found"
            self.manager.free(found)

    @rule()
    def evict(self) -> None:
        """Somebody needs every block there is: nothing idle survives."""
        table = self.manager.new_table()
        self.manager.append(table, 3 * self.manager.num_free)
        assert self.manager.num_free == self.manager.num_idle == 0
        for slot in self.manager.slots(table, 0, table.length):
            self.memory[slot] = None
        self.manager.free(table)

    @rule(table=consumes(tables), is_published=st.booleans(), is_wrong=st.booleans())
    def free(self, table: BlockTable, is_published: bool, is_wrong: bool) -> None:
        if is_published:
            self.published.append([*self.texts[table], 0])
            self.manager.publish(table, self.published[-1])
        if is_wrong:
            self.manager.unpublish(table)
            found = self.manager.new_table(table.tenant, [*self.texts[table], 0])
            assert not set(found.block_ids) & set(table.block_ids), "what may be wrong is found"
            self.manager.free(found)
        self.manager.free(table)
        del self.texts[table]

    @invariant()
    def bookkeeping_is_sound_and_texts_are_intact(self) -> None:
        self.manager.check_integrity()
        for table, text in self.texts.items():
            found = [self.memory[slot] for slot in self.manager.slots(table, 0, table.length)]
            assert found == [(table.tenant, tuple(text[: i + 1])) for i in range(len(text))]

    def teardown(self) -> None:
        for table in self.texts:
            self.manager.free(table)
        assert self.manager.num_free == 12, "every block comes back"


BlockMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = BlockMachine.TestCase
