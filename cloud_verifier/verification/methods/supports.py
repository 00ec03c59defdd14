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
    residual = target_probs(round_input, row) - support_probs(round_input.supports[row]) / kept
    return _sample_changed(round_input, row, residual, key)


class Remainder:
    """Holds what is left of p and q at a row while children that were drawn from q without replacement are judged.

    With x₁ … the children rejected so far, q is renormalised without them, and p is norm(max(p − q, 0)) after each.
    Outside the support q is 0, so that p keeps its proportions there: `_target` is p at the support's ids, in units
    in which an id outside of it keeps the row's own p, and `_mass` the sum over all ids.
    """

    def __init__(self, round_input: RoundInput, row: int) -> None:
        self._round_input, self._row = round_input, row
        support = round_input.supports[row]
        self._places = {token_id: place for place, token_id in enumerate(support.token_ids)}
        self._weights = np.array(support.weights, np.float64)
        self._target = target_probs(round_input, row)
        self._outside = max(0.0, 1.0 - float(self._target.sum()))

    @property
    def _mass(self) -> float:
        return float(self._target.sum()) + self._outside

    def ratio(self, token_id: int) -> float:
        """Returns p/q of a child that was drawn from what is left of q."""
        place, mass = self._places[token_id], self._mass
        draft_prob = self._weights[place] / self._weights.sum()
        return float(self._target[place] / (mass * draft_prob)) if mass > 0.0 else 0.0

    def reject(self, token_id: int) -> None:
        """Takes a rejected child out."""
        draft_probs = self._weights / self._weights.sum()
        self._target = np.maximum(self._target - self._mass * draft_probs, 0.0)
        self._weights[self._places[token_id]] = 0.0

    def sample(self) -> int:
        """Returns a sample of what is left of p, keyed (RESIDUAL, start, row)."""
        return _sample_changed(self._round_input, self._row, self._target)


def _sample_changed(
    round_input: RoundInput, row: int, weights: NDArray[np.float64], key: NoiseKey | None = None
) -> int:
    """Returns a sample ∝ max(weight, 0) at the ids of the row's support and p elsewhere."""
    key = key or NoiseKey(Purpose.RESIDUAL, round_input.position, row)
    ids = round_input.supports[row].token_ids
    return round_input.rows.sample(row, key, dict(zip(ids, _logs(weights), strict=True)))


def _logs(values: NDArray[np.float64]) -> Sequence[float]:
    """Returns log max(value, 0) of each."""
    with np.errstate(divide="ignore"):
        logs: list[float] = np.log(np.maximum(values, 0.0)).tolist()
    return logs
