"""Masks of grammars, a bit for each id, over the scores of several rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from outrider.kernels.host.compiler import jit

_BITS = 32  # ids a word


@jit(types.void(types.float32[:, ::1], types.int32[:, ::1]))
def mask_scores(scores: Any, words: Any) -> None:
    """Computes `outrider.kernels.reference.mask_scores`."""
    num_ids = min(scores.shape[1], _BITS * words.shape[1])
    for row in range(scores.shape[0]):
        for index in range((num_ids + _BITS - 1) // _BITS):
            word = np.uint32(words[row, index])
            if word == np.uint32(0xFFFFFFFF):
                continue
            first = index * _BITS
            for token_id in range(first, min(first + _BITS, num_ids)):
                if not (word >> np.uint32(token_id - first)) & np.uint32(1):
                    scores[row, token_id] = -np.inf
        scores[row, num_ids:] = -np.inf
