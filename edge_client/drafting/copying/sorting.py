"""Sorts the places of texts by their contexts (`contexts.py`), by prefix doubling in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.copying.contexts import MAX_MATCH, SEPARATOR

NUM_SORTS = MAX_MATCH.bit_length() - 1  # each doubles the tokens that contexts are sorted by, from two on


def sorted_places(
    token_ids: NDArray[np.uint32], on_progress: Callable[[int], None] = lambda num_sorts: None
) -> NDArray[np.uint32]:
    """Returns the places of texts, each followed by `SEPARATOR`, that have a token after them and one before, by the
    `MAX_MATCH` tokens before each read backwards.

    `on_progress` is told the sorts done, of `NUM_SORTS`. The memory that it takes at most is 32 bytes a token.
    """
    num_tokens = len(token_ids)
    order = np.arange(num_tokens)
    ranks = token_ids[::-1] + np.uint32(1)  # 0 is what comes before the first text
    ranks[ranks == 0] = SEPARATOR
    for number in range(NUM_SORTS):
        keys = _pairs(ranks, 1 << number)
        order = np.argsort(keys)
        ranks = _ranks(keys, order)
        del keys
        on_progress(number + 1)
    ends = num_tokens - order
    del order, ranks
    ends = ends[ends < num_tokens]
    is_inside = (token_ids[ends] != SEPARATOR) & (token_ids[ends - 1] != SEPARATOR)
    places: NDArray[np.uint32] = ends[is_inside].astype(np.uint32)
    return places


def _pairs(ranks: NDArray[np.uint32], offset: int) -> NDArray[np.uint64]:
    """Returns keys that sort by a rank and the one `offset` later; past the end there is 0."""
    keys = ranks.astype(np.uint64)
    keys <<= np.uint64(32)
    keys[: max(0, len(ranks) - offset)] |= ranks[offset:]
    return keys


def _ranks(keys: NDArray[np.uint64], order: NDArray[Any]) -> NDArray[np.uint32]:
    """Returns the rank of each key from 1 on; equal keys have one."""
    is_new = np.ones(len(keys), np.uint32)
    in_order = keys[order]
    is_new[1:] = in_order[1:] != in_order[:-1]
    del in_order
    ranks = np.empty(len(keys), np.uint32)
    ranks[order] = np.cumsum(is_new, dtype=np.uint32)
    return ranks
