"""The target in this process, after everything was measured: what it says of texts that others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.common.noise.draws import gumbel_row
from outrider.common.sampling.processors import process_logits
from outrider.common.types import SamplingParams

TIE_SCORE = 1e-4  # docs/design.md §7, numerics: what two float32 forwards of different shape may differ by


class Scorer:
    """Loads the target's weights. `fingerprint` says whether it is the one that wrote."""

    def __init__(self, target: Path) -> None:
        from outrider.cloud_verifier.backends.loading import load_target

        self._backend = load_target(target)
        self.fingerprint = self._backend.fingerprint

    def is_tie(
        self, prompt_ids: Sequence[int], written: Sequence[int], a: int, b: int, sampling: SamplingParams
    ) -> bool:
        """Returns whether after prompt and `written` the target could choose `a` as well as `b`, noise
        included."""
        scores = self._scores(prompt_ids, written, 1, sampling)[0]
        return bool(abs(scores[a] - scores[b]) < TIE_SCORE)

    def unlike(
        self, prompt_ids: Sequence[int], written: Sequence[int], sampling: SamplingParams
    ) -> list[int]:
        """Returns which of the written tokens the target would not have chosen after those before them, ties
        left out. The parameters may not count tokens: no penalties, no least length."""
        if not written:
            return []
        scores = self._scores(prompt_ids, written[:-1], len(written), sampling)
        chosen = scores[np.arange(len(written)), list(written)]
        return np.flatnonzero(scores.max(axis=1) - chosen >= TIE_SCORE).tolist()

    def _scores(
        self, prompt_ids: Sequence[int], written: Sequence[int], num_rows: int, sampling: SamplingParams
    ) -> np.ndarray:
        """Returns the processed logits after the last `num_rows` tokens, with noise: [num_rows, vocab]."""
        text = [*prompt_ids, *written]
        rows = []
        for row, logits in enumerate(self._logits(text, num_rows)):
            position = len(text) - num_rows + row + 1
            named = {"prompt_ids": prompt_ids, "output_ids": text[len(prompt_ids) : position]}
            scores = process_logits(np, logits[None], sampling, num_tokens=self._backend.num_tokens, **named)[
                0
            ].astype(np.float64)
            if sampling.temperature:
                scores = scores + gumbel_row(sampling.seed, position, len(scores))
            rows.append(scores)
        return np.stack(rows)

    def nats(self, prompt_ids: Sequence[int], written: Sequence[int]) -> float:
        """Returns the loss of the written tokens, summed, under the target's own distribution at
        temperature 1."""
        if not written:
            return 0.0
        rows = self._logits([*prompt_ids, *written[:-1]], len(written)).astype(np.float64)
        rows = rows[:, : self._backend.num_tokens]
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(written)), list(written)]
        return float((np.log(np.exp(rows).sum(axis=1)) - chosen).sum())

    def _logits(self, token_ids: list[int], num_rows: int) -> np.ndarray:
        from outrider.cloud_verifier.backends.base import ForwardItem

        sequence = self._backend.new_sequence()
        try:
            return np.asarray(self._backend.forward([ForwardItem(sequence, token_ids, num_rows)]))
        finally:
            self._backend.close(sequence)
