"""The hash chain: golden values, and what truncating and comparing mean."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.common.alignment import GENESIS_HASH, TokenChain, extend_hash

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hashes.json").read_text())
ids = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["hash_bytes"])
def test_hashes_are_the_golden_ones(case):
    assert extend_hash(GENESIS_HASH, case["token_ids"]) == case["hash"]
    assert case["hash"].to_bytes(8, "little").hex() == case["hash_bytes"]


@given(ids, ids)
def test_a_hash_extends_in_any_pieces(first, second):
    whole = extend_hash(GENESIS_HASH, first + second)
    assert extend_hash(extend_hash(GENESIS_HASH, first), second) == whole
    chain = TokenChain(first)
    chain.extend(second)
    chain.check_integrity()
    assert (chain.position, chain.hash, chain.token_ids) == (len(first + second), whole, first + second)


@given(ids, st.data())
def test_truncating_gives_the_chain_of_the_prefix(tokens, data):
    position = data.draw(st.integers(0, len(tokens)))
    chain = TokenChain(tokens)
    hash_there = chain.hash_at(position)
    chain.truncate(position)
    chain.check_integrity()
    assert chain.hash == hash_there == TokenChain(tokens[:position]).hash


def test_chains_agree_on_a_shared_prefix_and_nowhere_after_it():
    ours, theirs = TokenChain([1, 2, 3, 4]), TokenChain([1, 2, 9, 4])
    agreed = [ours.agrees(position, theirs.hash_at(position)) for position in range(5)]
    assert agreed == [True, True, True, False, False]
    assert not ours.agrees(5, ours.hash)
    assert not ours.agrees(-1, ours.hash)


def test_an_id_beyond_uint32_is_refused_and_changes_nothing():
    chain = TokenChain([1, 2])
    with pytest.raises(OverflowError):
        chain.extend([3, 2**32])
    assert chain.token_ids == [1, 2]
    chain.check_integrity()


def test_a_changed_text_fails_the_integrity_check():
    chain = TokenChain([1, 2, 3])
    chain.token_ids[1] = 7
    with pytest.raises(AssertionError, match="hash at 2"):
        chain.check_integrity()


def test_a_hash_looked_at_ahead_is_that_of_the_text_whatever_follows() -> None:
    for appended in [(5, 6, 7), (5, 6), (5, 9), (5, 6, 7, 8), ()]:
        chain = TokenChain((1, 2))
        assert chain.hash_with((5, 6, 7)) == TokenChain((1, 2, 5, 6, 7)).hash
        chain.extend(appended)
        chain.check_integrity()
        assert chain.hash == TokenChain((1, 2, *appended)).hash
        chain.extend((5, 6, 7))  # behind another text
        chain.check_integrity()
