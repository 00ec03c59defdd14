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
        logits = self._logits([*prompt_ids, *written], 1)
        scores = process_logits(
            np,
            logits,
            sampling,
            prompt_ids=prompt_ids,
            output_ids=written,
            num_tokens=self._backend.num_tokens,
        )[0].astype(np.float64)
        if sampling.temperature:
            scores = scores + gumbel_row(sampling.seed, len(prompt_ids) + len(written), len(scores))
        return bool(abs(scores[a] - scores[b]) < TIE_SCORE)

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
