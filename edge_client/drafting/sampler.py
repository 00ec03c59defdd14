"""Turn the draft's logits into a drafted token, its probability and the signals, in a few numpy passes.

Scores and noise come from `common.sampling`, over the whole vocabulary, so the draft's sample is the
verifier's wherever their distributions agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError
from common.sampling import choose, is_plain, process_logits
from common.types import SamplingParams, Signals

Float32 = NDArray[np.float32]
Sampled = tuple[int, float, Signals]  # token id, probability it was sampled with, signals


class DraftSampler:
    """Samples for one sequence; owns scratch space of one vocabulary, so it is not thread-safe."""

    def __init__(self, params: SamplingParams, num_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._scratch = np.empty(num_tokens, np.float32)
        self._is_greedy = params.temperature == 0
        self._needs_history = not is_plain(params)
        is_untouched = self._is_greedy or (
            params.temperature == 1 and params.top_k == 0 and params.top_p == 1 and params.min_p == 0
        )
        self._is_raw = is_untouched and not self._needs_history and not params.logit_bias

    @property
    def needs_history(self) -> bool:
        """Whether `sample` must be given the text (penalties, bad words, minimum length)."""
        return self._needs_history

    def sample(
        self, logits: Float32, position: int, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
    ) -> Sampled:
        """Sample the token at index `position` from `logits` `[1, num_tokens]`, which stay unchanged.

        At temperature 0 the probability is 1. Raises `ModelError` when the logits are not finite.
        """
        row = logits[0]
        top_id = int(row.argmax())
        top, total, mean = self._moments(row, float(row[top_id]))
        if self._is_raw and self._is_greedy:
            token_id, prob = top_id, 1.0
        else:
            scores = self._process(logits, prompt_ids, output_ids)
            token_id = int(choose(scores, self._params, (position,))[0])
            prob = 1.0 if self._is_greedy else self._prob(scores[0], token_id, top, total)
        log_total = math.log(total)
        signals = Signals(
            entropy_bits=max(0.0, (log_total - mean) / math.log(2)),
            nll=max(0.0, log_total - (float(row[token_id]) - top)),
            margin=(1.0 - self._second(top_id)) / total,
        )
        return token_id, prob, signals

    def _moments(self, row: Float32, top: float) -> tuple[float, float, float]:
        """top, Σ exp(row − top) and the mean of (row − top) under softmax; scratch holds exp(row − top)."""
        shifted = row - np.float32(top)
        weights = np.exp(shifted, out=self._scratch)
        total = float(weights.sum())
        if not math.isfinite(total):
            raise ModelError("the draft's logits are not finite; its weights or its export are damaged")
        return top, total, float(weights @ shifted) / total

    def _second(self, top_id: int) -> float:
        """The second largest weight; overwrites the largest in scratch, where it is 1."""
        self._scratch[top_id] = 0
        return float(self._scratch.max())

    def _process(self, logits: Float32, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Any:
        if self._is_raw:
            return logits
        return process_logits(
            np,
            logits,
            self._params,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            eos_token_ids=self._eos_token_ids,
        )

    def _prob(self, scores: Float32, token_id: int, top: float, total: float) -> float:
        score = float(scores[token_id])
        if self._is_raw:
            return math.exp(score - top) / total
        highest = scores.max()
        return math.exp(score - float(highest)) / float(np.exp(scores - highest).sum())
