"""The draft's signals at one position, in numpy: the edge computes them for every drafted token."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_BITS_A_NAT = 1 / math.log(2)


def draft_signals(
    logits: NDArray[np.float32], probs: NDArray[np.float32], token_id: int, top_id: int
) -> tuple[float, float, float]:
    """Returns (entropy in bits, nll of `token_id` in nats, margin) as
    `outrider.kernels.reference.draft_signals` does.

    `probs` [vocab] is softmax(logits) and `top_id` its argmax; the caller has both already. Entropy is
    log Σ exp(logits) − Σ probs · logits, one dot product. `probs` is written to and restored.
    """
    top_prob = float(probs[top_id])
    log_total = float(logits[top_id]) - math.log(top_prob)
    probs[top_id] = 0  # so that the largest is the second
    second_prob = float(probs.max())
    probs[top_id] = top_prob
    entropy = log_total - float(probs @ logits)
    return (
        max(0.0, entropy * _BITS_A_NAT),
        max(0.0, log_total - float(logits[token_id])),
        top_prob - second_prob,
    )
