"""Turn what the graph says about the next token into a drafted token, its probability and the signals.

Scores and noise come from `common.sampling`, over the whole vocabulary, so the draft's sample is the
verifier's wherever their distributions agree. The graph brings its softmax along, which saves most
passes over the vocabulary here.
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
from edge_client.drafting.onnx_runner import Rows

Sampled = tuple[int, float, Signals]  # token id, probability it was sampled with, signals
_BITS_A_NAT = 1 / math.log(2)


class DraftSampler:
    """Samples for one sequence, with the rows of a runner made for the same temperature."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._is_greedy = params.temperature == 0
        self._needs_history = not is_plain(params)
        is_unbiased = not self._needs_history and not params.logit_bias
        is_whole = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
        self._is_argmax = self._is_greedy and is_unbiased
        self._is_softmax = not self._is_greedy and is_unbiased and is_whole

    @property
    def needs_history(self) -> bool:
        """Whether `sample` must be given the text (penalties, bad words, minimum length)."""
        return self._needs_history

    def sample(
        self, rows: Rows, position: int, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
    ) -> Sampled:
        """Sample the token at index `position` of the text.

        At temperature 0 its probability is 1. Raises `ModelError` when the logits are not finite.
        """
        probs = rows.probs[0]
        top_id = int(probs.argmax())
        top_prob = float(probs[top_id])
        if not math.isfinite(top_prob):
            raise ModelError("the draft's logits are not finite; its weights or its export are damaged")
        token_id, prob = self._choose(rows, position, prompt_ids, output_ids)
        return token_id, prob, _signals(rows, token_id, top_id, top_prob)

    def _choose(
        self, rows: Rows, position: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> tuple[int, float]:
        if self._is_argmax:
            return int(rows.logits.argmax()), 1.0
        if self._is_softmax:  # what `process_logits` would return, and already there
            token_id = int(choose(rows.tempered_logits, self._params, (position,))[0])
            return token_id, float(rows.tempered_probs[0, token_id])
        scores: NDArray[Any] = process_logits(
            np,
            rows.logits,
            self._params,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            eos_token_ids=self._eos_token_ids,
        )
        token_id = int(choose(scores, self._params, (position,))[0])
        if self._is_greedy:
            return token_id, 1.0
        return token_id, _softmax_at(scores[0], token_id)


def _softmax_at(scores: NDArray[np.float32], token_id: int) -> float:
    highest = scores.max()
    return math.exp(float(scores[token_id] - highest)) / float(np.exp(scores - highest).sum())


def _signals(rows: Rows, token_id: int, top_id: int, top_prob: float) -> Signals:
    """Entropy = log Σ exp(logits) − Σ probs · logits, so one dot product is all it takes."""
    logits, probs = rows.logits[0], rows.probs[0]
    log_total = float(logits[top_id]) - math.log(top_prob)
    probs[top_id] = 0  # so that the largest is the second; the row is ours until the next run
    second_prob = float(probs.max())
    probs[top_id] = top_prob
    return Signals(
        entropy_bits=max(0.0, (log_total - float(probs @ logits)) * _BITS_A_NAT),
        nll=max(0.0, log_total - float(logits[token_id])),
        margin=top_prob - second_prob,
    )
