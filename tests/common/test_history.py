"""The processors' view of a sequence: kept while it changes, it must be what a new look would give."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.common.alignment import TokenChain
from outrider.common.sampling.history import BadWords, History, TokenCounts
from outrider.common.types import SamplingParams

EVERYTHING = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5)
ids = st.lists(st.integers(0, 5), max_size=8)


def counted(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.ids.tolist(), counts.amounts.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(ids.filter(bool), st.lists(st.tuples(st.integers(0, 8), ids), max_size=6))
def test_counts_that_follow_a_sequence_are_those_of_a_new_look_at_it(
    prompt: list[int], changes: list[tuple[int, list[int]]]
) -> None:
    chain, history = TokenChain(prompt), History(EVERYTHING, prompt)
    for num_cut, new_ids in changes:
        chain.truncate(max(len(prompt), chain.position - num_cut))
        chain.extend(new_ids)
        history.follow(chain, len(prompt))
        assert counted(history.seen) == Counter(chain.token_ids)
        assert counted(history.output) == Counter(chain.token_ids[len(prompt) :])


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=8)


@given(words, ids)
def test_bad_words_are_found_as_by_comparing_each(listed: list[tuple[int, ...]], text: list[int]) -> None:
    found = {i for each in BadWords(listed).completing(text, len(text)) for i in each.tolist()}
    assert found == {w[-1] for w in listed if tuple(text[len(text) - len(w) + 1 :]) == w[:-1]}


def test_a_look_up_costs_the_same_beside_a_hundred_thousand_words() -> None:
    few = BadWords([(1, 2, 3)])
    many = BadWords([(i % 97, i % 89, i) for i in range(100_000)])
    assert num_lines_of(many) < 20 * num_lines_of(few), "words are searched one by one"


def test_bad_words_hold_what_the_bound_on_their_ids_allows_for() -> None:
    """About 50 bytes an id (`--tenant-max-sampling-ids`), of which the ids themselves take 40."""
    listed = [tuple(range(1000 * n, 1000 * n + 64)) for n in range(126)]
    tracemalloc.start()
    try:
        bad_words = BadWords(listed)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bad_words.longest == 64 and num_bytes < 10 * 126 * 64


def num_lines_of(bad_words: BadWords) -> int:
    """Counts the lines of Python that 64 look-ups execute: a machine under load takes longer, but no more of them."""
    num_lines, tracing = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        for end in range(64):
            list(bad_words.completing(range(64), end))
    finally:
        sys.settrace(tracing)
    return num_lines
