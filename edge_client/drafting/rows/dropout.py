"""Makes the masks of MC dropout from keyed noise, and measures the variance that they cause.

The variant of the draft's graph (`dropout_graph.py`) returns, beside the ordinary row, the rows of
`num_samples` copies of the last MLP and all after it, each with some inputs of that MLP's matrices dropped.
Masks are a function of the seed and of the token's index alone, so they are the same on any machine, after
any rollback and however a sequence was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.common.noise.philox import Purpose, lanes_row

DEFAULT_SAMPLES = 8
DEFAULT_RATE = 0.1
MAX_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class DropoutPlan:
    """Holds the numbers that the variant of one draft was exported with."""

    num_samples: int
    rate: float
    width: int  # inputs of the last MLP's matrices, side by side
    num_candidates: int  # ids whose logits are computed under every mask


@dataclass(frozen=True, slots=True)
class Candidates:
    """Holds the most probable ids, best first, and their logits under each mask."""

    ids: NDArray[np.int64]  # [num_candidates]
    logits: NDArray[np.float32]  # [num_samples, num_candidates]


def fill_masks(masks: NDArray[np.float32], rate: float, seed: int, position: int) -> None:
    """Writes the masks of the token at index `position` into `masks` [num_samples, 1, width].

    An entry is 0 where its 32-bit lane of `noise.philox` is below rate · 2^32, else 1 / (1 − rate); lanes are
    counted through the samples in order, so fewer samples are the first of more.
    """
    lanes = lanes_row(seed, position, masks.size, Purpose.DROPOUT, 0).reshape(masks.shape)
    np.multiply(lanes >= np.uint32(round(rate * 2**32)), np.float32(1 / (1 - rate)), out=masks)


def top_variance(candidates: Candidates) -> float:
    """Returns the variance over the masks of ln p of the most probable id, in nats².

    p is normalised over the candidates, so that no mask needs the whole vocabulary. The logarithm is used
    because the variance of p itself is smallest where the draft is least certain (docs/mc-dropout.md has both
    measured). Unbiased: divided by num_samples − 1.
    """
    scores = candidates.logits - candidates.logits[:, :1]  # [num_samples, num_candidates]; the first's is 0
    highest = scores.max(axis=1, keepdims=True)  # at least 0
    logs = -highest[:, 0] - np.log(np.exp(scores - highest, dtype=np.float64).sum(axis=1))
    return float(logs.var(ddof=1))
