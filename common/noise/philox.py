"""Raw words of numpy's Philox 4x64-10 at any counter, and the 32-bit lane that belongs to a token id.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Block b is the 64-bit words 4b ... 4b+3 of
`Philox(key=[seed, purpose], counter=[0, position, index, 0]).random_raw`; a token id's lane is lane id % 8 of
block id // 8, low half of a word first.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIdArray = Sequence[int] | NDArray[np.integer[Any]]

_LANES_A_BLOCK = 8
_WORDS_A_BLOCK = 4
_WORD_NS = 4.6  # one word in sequence; measured, only chooses the cheaper way
_SEEK_NS = 2600.0  # moving to another counter and drawing one block there


class Purpose(enum.IntEnum):
    """Separates draws for different purposes, as the second word of the key.

    The values are the protocol's.
    """

    COUPLED = 0
    ACCEPT = 1
    RESIDUAL = 2
    CANDIDATE = 3
    DRAFT = 4
    DROPOUT = 5  # of the edge alone: nothing on the wire depends on it


class _Stream(threading.local):
    """Moves one Philox a thread by setting its state: eight times cheaper than making a new one."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state: Any = self._generator.state
        self._counter: NDArray[np.uint64] = self._state["state"]["counter"]
        self._key: NDArray[np.uint64] = self._state["state"]["key"]

    def words(
        self, seed: int, purpose: int, position: int, index: int, first_block: int, num_words: int
    ) -> NDArray[np.uint64]:
        self._key[0], self._key[1] = seed, purpose
        self._counter[0], self._counter[1], self._counter[2] = first_block, position, index
        self._generator.state = self._state
        return np.asarray(self._generator.random_raw(num_words))


_stream = _Stream()


def first_word(seed: int, purpose: int, position: int, index: int) -> int:
    """Returns the first 64-bit word of a counter."""
    return int(_stream.words(seed, purpose, position, index, 0, 1)[0])


def lanes_row(seed: int, position: int, num_tokens: int, purpose: int, index: int) -> NDArray[np.uint32]:
    """Returns the lanes of token ids 0 ... num_tokens-1: uint32 [num_tokens]."""
    words = _stream.words(seed, purpose, position, index, 0, (num_tokens + 1) // 2)
    return _low_half_first(words)[:num_tokens]


def lanes_at(
    seed: int, position: int, token_ids: TokenIdArray, purpose: int, index: int
) -> NDArray[np.uint32]:
    """Returns the lanes of some token ids: uint32 [n], in the cheaper of two ways."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if not ids.size:
        return np.empty(0, np.uint32)
    num_row_tokens = int(ids.max()) + 1
    if num_row_tokens / 2 * _WORD_NS <= ids.size * _SEEK_NS:
        return lanes_row(seed, position, num_row_tokens, purpose, index)[ids]
    blocks = {
        block: _low_half_first(_stream.words(seed, purpose, position, index, block, _WORDS_A_BLOCK))
        for block in set((ids // _LANES_A_BLOCK).tolist())
    }
    lanes = [blocks[i // _LANES_A_BLOCK][i % _LANES_A_BLOCK] for i in ids.tolist()]
    return np.array(lanes, np.uint32)


def _low_half_first(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return words.astype("<u8", copy=False).view("<u4")
