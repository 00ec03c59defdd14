"""Numbers by position: the target's tokens and the draft's luck, the same in every process and any order."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.common.alignment import extend_hash

VOCAB_SIZE = 256
FIRST_TOKEN, NUM_TOKENS = 33, 94  # what it writes: printable ASCII without the space
_BLOCK = 1024  # words at least
_TOKENS, _COINS = 0, 1  # second words of the key


class _KeyedWords:
    """Computes Philox words ahead and keeps them: word t of a stream is a function of (key, t)."""

    def __init__(self, key: int, purpose: int) -> None:
        self._key = [key, purpose]
        self._words = np.empty(0, np.uint64)

    def upto(self, end: int) -> NDArray[np.uint64]:
        """Returns at least `end` words from the first on: uint64 [>= end]."""
        if end > len(self._words):
            num_words = max(end, 2 * len(self._words), _BLOCK)
            bits = np.random.Philox(key=np.array(self._key, np.uint64))
            self._words = np.asarray(bits.random_raw(num_words))
        return self._words


class KeyedTokens:
    """Holds the text that every prompt has: token t at position t of any text."""

    def __init__(self, seed: int) -> None:
        self._words = _KeyedWords(seed, _TOKENS)
        self._tokens = np.empty(0, np.int64)

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """Returns the tokens from `start` to `end`, int64 [end - start]."""
        if end > len(self._tokens):
            words = self._words.upto(end)
            self._tokens = (FIRST_TOKEN + words % np.uint64(NUM_TOKENS)).astype(np.int64)
        return self._tokens[start:end]


class KeyedCoins:
    """Holds coin t in [0, 1): by how much the draft errs at position t, for one prompt and one sampling
    seed."""

    def __init__(self, pair_seed: int, sampling_seed: int, prompt_ids: Sequence[int]) -> None:
        prompt_key = extend_hash(0, (*prompt_ids, pair_seed % 2**32))
        self._words = _KeyedWords(prompt_key ^ sampling_seed, _COINS)

    def between(self, start: int, end: int) -> NDArray[np.float64]:
        """Returns the coins from `start` to `end`, float64 [end - start]."""
        return np.asarray((self._words.upto(end)[start:end] >> np.uint64(11)) * 2.0**-53)


def wait_until(end_s: float) -> None:
    """Waits until `perf_counter` reaches `end_s`. The last tenth of a millisecond is spun: a sleep ends
    late."""
    if (left_s := end_s - time.perf_counter() - 1e-4) > 0:
        time.sleep(left_s)
    while time.perf_counter() < end_s:
        pass
