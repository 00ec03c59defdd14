"""`TargetRows` over logits in host memory, and the coins of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.methods.base import NoiseKey
from common.noise import Purpose, gumbel_row, uniform
from common.sampling import apply_text, choose, shape
from common.types import SamplingParams, TokenIds


class KeyedCoins:
    """`Coins` at one start."""

    def __init__(self, seed: int, start: int) -> None:
        self._seed, self._start = seed, start

    def accepts(self, probability: float, offset: int) -> bool:
        return uniform(self._seed, self._start, offset, Purpose.ACCEPT) < probability


class HostRows:
    """`TargetRows` from raw logits [num_draft_tokens + 1, vocab_size] float32, which stay unchanged."""

    def __init__(
        self,
        logits: NDArray[np.float32],
        sampling: SamplingParams,
        position: int,
        *,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        draft_token_ids: TokenIds,
        eos_token_ids: TokenIds,
        num_tokens: int,
    ) -> None:
        """`output_ids`: committed tokens after the prompt; ids at or above `num_tokens` are masked."""
        self._sampling, self._position = sampling, position
        self._texted: NDArray[np.float32] = apply_text(
            np,
            logits,
            sampling,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            draft_token_ids=draft_token_ids,
            eos_token_ids=eos_token_ids,
            num_tokens=num_tokens,
        )
        self._scores: dict[int, NDArray[np.float32]] = {}
        self._log_total: dict[int, float] = {}
        self._greedy: list[int] | None = None

    def log_probs(self, row: int, token_ids: Sequence[int]) -> NDArray[np.float64]:
        if self._sampling.temperature == 0:
            is_best = np.asarray(token_ids) == self.own_sample(row)
            return np.where(is_best, 0.0, -math.inf)
        scores = self._row(row)[np.asarray(token_ids, np.int64)]
        return scores.astype(np.float64) - self._log_sum(row)

    def entropy(self, row: int) -> float:
        if self._sampling.temperature == 0:
            return 0.0
        scores = self._row(row)
        logs = scores[np.isfinite(scores)].astype(np.float64) - self._log_sum(row)
        return float(-(np.exp(logs) * logs).sum())

    def own_sample(self, row: int) -> int:
        if self._sampling.temperature == 0:  # greedy rows are cheap together
            if self._greedy is None:
                self._greedy = choose(self._texted, self._sampling, range(len(self._texted))).tolist()
            return self._greedy[row]
        return int(choose(self._row(row)[None], self._sampling, (self._position + row,))[0])

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        if self._sampling.temperature == 0:
            return self._greedy_sample(row, changed or {})
        weights = self._row(row).astype(np.float64)
        noise = gumbel_row(self._sampling.seed, key.position, weights.size, key.purpose, key.index)
        if changed:
            ids = np.fromiter(changed, np.int64, len(changed))
            before = weights[ids]
            weights[ids] = np.fromiter(changed.values(), np.float64, len(changed)) + self._log_sum(row)
            if not np.isfinite(weights.max()):
                weights[ids] = before
        return int((weights + noise).argmax())

    def _greedy_sample(self, row: int, changed: Mapping[int, float]) -> int:
        best = self.own_sample(row)
        weights = {best: 0.0} | dict(changed)
        most = max(weights.values())
        if most == -math.inf:
            return best
        return min(token_id for token_id, weight in weights.items() if weight == most)

    def _row(self, row: int) -> NDArray[np.float32]:
        scores = self._scores.get(row)
        if scores is None:
            scores = self._scores[row] = shape(np, self._texted[row : row + 1], self._sampling)[0]
        return scores

    def _log_sum(self, row: int) -> float:
        total = self._log_total.get(row)
        if total is None:
            scores = self._row(row)
            largest = scores.max()
            total = float(largest) + math.log(float(np.exp(scores - largest).sum(dtype=np.float64)))
            self._log_total[row] = total
        return total
