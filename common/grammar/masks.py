"""Applies masks of grammars to scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def mask_scores(xp: Any, scores: Any, words: Any) -> None:
    """Sets the scores [rows, vocab] that `words` do not allow to -inf, in place.

    `words` is int32 [rows, ceil(num_tokens / 32)], a bit for each id, low bit first; ids beyond it are not allowed.
    `xp` is the module `numpy` or `torch`, and both are arrays of it.
    """
    if xp is np:
        allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]]
        np.copyto(scores[:, : allowed.shape[1]], -math.inf, where=allowed == 0)
    else:
        shifts = xp.arange(32, dtype=xp.int32, device=scores.device)
        bits = (words[:, :, None] >> shifts) & 1
        allowed = bits.reshape(len(words), -1)[:, : scores.shape[1]]
        scores[:, : allowed.shape[1]].masked_fill_(allowed == 0, -math.inf)
    scores[:, allowed.shape[1] :] = -math.inf
