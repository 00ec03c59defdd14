"""The draft's truncated distributions q from its supports: q = weight / Σ weights in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey, RoundInput
from outrider.common.noise.draws import Purpose
from outrider.common.types import Support


def support_probs(support: Support) -> NDArray[np.float64]:
    """Returns q of each id of the support, [n]."""
    weights = np.array(support.weights, np.float64)
    return np.asarray(weights / weights.sum())


def target_probs(round_input: RoundInput, row: int) -> NDArray[np.float64]:
    """Returns p of each id of the support at `row`, [n]."""
    return np.asarray(np.exp(round_input.rows.log_probs(row, round_input.supports[row].token_ids)))


def sample_residual(
    round_input: RoundInput, row: int, *, kept: float = 1.0, key: NoiseKey | None = None
) -> int:
    """Returns a sample ∝ max(kept · p − q, 0), for 0 < kept ≤ 1, keyed (RESIDUAL, start, row) by default.

    Outside the support q is 0 and the residual proportional to p: only the weights of the support's ids
    change.
    """
    support = round_input.supports[row]
    residual = target_probs(round_input, row) - support_probs(support) / kept
    key = key or NoiseKey(Purpose.RESIDUAL, round_input.position, row)
    return round_input.rows.sample(row, key, dict(zip(support.token_ids, _logs(residual), strict=True)))


def _logs(values: NDArray[np.float64]) -> Sequence[float]:
    """Returns log max(value, 0) of each."""
    with np.errstate(divide="ignore"):
        logs: list[float] = np.log(np.maximum(values, 0.0)).tolist()
    return logs
