"""`KVPool` and `PrefixCache`: the engine's block manager by other names."""

from __future__ import annotations

import pytest

import outrider
from outrider import KVPool, PrefixCache


def test_drafted_blocks_become_the_sequences_own_and_are_found_by_its_tokens() -> None:
    pool = KVPool(8, block_size=4)
    cache = PrefixCache(pool)
    blocks = pool.allocate(6)
    assert (len(blocks.block_ids), blocks.length, pool.num_free) == (2, 0, 6)
    prompt = [1, 2, 3, 4, 5, 6]
    assert cache.match(prompt) == []
    pool.promote(blocks, prompt)
    pool.check_integrity()
    assert blocks.length == 6 and cache.match(prompt) == [*blocks.block_ids[:1]], "whole blocks"
    assert cache.match([1, 2, 3, 9]) == []
    pool.free(blocks)
    assert (pool.num_free, len(cache.match(prompt))) == (8, 1), "cached until the room is needed"
    pool.free(pool.allocate(32))
    assert cache.match(prompt) == []
    pool.check_integrity()


def test_drafts_that_were_rejected_are_freed() -> None:
    pool = KVPool(2, block_size=4)
    rejected = pool.allocate(8)
    with pytest.raises(outrider.UsageError, match="1 KV blocks needed, 0 free"):
        pool.allocate(1)
    pool.free(rejected)
    assert pool.num_free == 2
    for use in (pool.free, pool.promote):
        with pytest.raises(outrider.UsageError, match="were freed"):
            use(rejected)
    pool.check_integrity()


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(outrider.UsageError, match="0 KV blocks"):
        KVPool(0)
    with pytest.raises(outrider.UsageError, match="num_tokens is 0"):
        KVPool(1).allocate(0)
