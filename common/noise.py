"""Counter-based randomness: the same number for the same key, on both sides, in any order (DESIGN §5).

Gumbel noise for token id i at a position is -log(E), E = -log1p(-v), v = (x + 1/2) 2^-32 in float64,
x the id's 32-bit lane of Philox 4x64-10 (Salmon et al. 2011): block b = i // 8 is the 64-bit words
4b ... 4b+3 of numpy's `Philox(key=[seed, purpose], counter=[0, position, index, 0]).random_raw`, low half
of a word first, lane i % 8. It does not depend on the vocabulary's size and any subset can be computed
alone. Golden values: docs/protocol.md.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LANES_A_BLOCK = 8
_WORDS_A_BLOCK = 4
_WORD_NS = 4.6  # numpy's Philox, one 64-bit word in sequence
_SEEK_NS = 2600.0  # moving to another counter and drawing one block there


class Purpose(enum.IntEnum):
    """Second word of the key: draws for different purposes are independent. Values are the protocol's."""

    COUPLED = 0
    ACCEPT = 1
    RESIDUAL = 2
    CANDIDATE = 3
    DRAFT = 4
    BLOCK = 5


class _Stream(threading.local):
    """One Philox a thread, moved by setting its state: eight times cheaper than making a new one."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state: dict[str, Any] = dict(self._generator.state)
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


def lanes_row(
    seed: int, position: int, num_tokens: int, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.uint32]:
    """Return the 32-bit lanes of token ids 0 ... num_tokens-1: uint32 [num_tokens]."""
    num_words = (num_tokens + 1) // 2
    words = _stream.words(seed, purpose, position, index, 0, num_words)
    return _low_half_first(words)[:num_tokens]


def lanes_at(
    seed: int,
    position: int,
    token_ids: Sequence[int] | NDArray[np.integer[Any]],
    purpose: int = Purpose.COUPLED,
    index: int = 0,
) -> NDArray[np.uint32]:
    """Return the 32-bit lanes of some token ids: uint32 [n], by whichever way is cheaper."""
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


def gumbel_of_lanes(lanes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the noise of 32-bit lanes: float64, finite, in [-3.14, 22.88]."""
    exponential = -np.log1p((lanes + 0.5) * -(2.0**-32))
    return np.asarray(-np.log(exponential))


def gumbel_row(
    seed: int, position: int, num_tokens: int, purpose: int = Purpose.COUPLED, index: int = 0
) -> NDArray[np.float64]:
    """Return the Gumbel noise of a whole vocabulary at one position: float64 [num_tokens].

    `seed` is a uint64; `index` separates draws of one purpose at one position (candidate i).
    """
    return gumbel_of_lanes(lanes_row(seed, position, num_tokens, purpose, index))


def gumbel_at(
    seed: int,
    position: int,
    token_ids: Sequence[int] | NDArray[np.integer[Any]],
    purpose: int = Purpose.COUPLED,
    index: int = 0,
) -> NDArray[np.float64]:
    """Return `gumbel_row(...)[token_ids]` without computing the row where that is cheaper: float64 [n]."""
    return gumbel_of_lanes(lanes_at(seed, position, token_ids, purpose, index))


def uniform(seed: int, start: int, offset: int, purpose: int) -> float:
    """Return one number in (0, 1), keyed (seed, start, offset, purpose): the chain methods' draws.

    (w // 2^11 + 1/2) 2^-53 with w the first word of Philox(key=[seed, purpose], counter=[0, start, offset, 0]).
    """
    word = int(_stream.words(seed, purpose, start, offset, 0, 1)[0])
    return ((word >> 11) + 0.5) * 2.0**-53


def coupled_argmax(
    scores: NDArray[np.floating[Any]], seed: int, positions: Sequence[int]
) -> NDArray[np.int64]:
    """Return argmax_i(float64(scores[r, i]) + gumbel_i(seed, positions[r])): int64 [rows].

    `scores` is float [rows, vocab]; -inf never wins against a finite score; equal sums go to the lowest id.
    """
    picks = [
        (scores[row].astype(np.float64) + gumbel_row(seed, position, scores.shape[1])).argmax()
        for row, position in enumerate(positions)
    ]
    return np.array(picks, np.int64)
