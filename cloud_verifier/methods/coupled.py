"""Coupled sampling: the target's own sample is always the answer (DESIGN §5).

The sample at index t is argmax over ids of (score + Gumbel noise keyed by (seed, t, id)); a draft token
stands where it equals that sample. The text is a function of target, parameters and seed alone,
so any draft, a hostile one too, changes the speed and nothing else. Gumbel-max: Maddison et al. 2014,
"A* Sampling", §2; coupling two models through common noise: Daliri et al. 2025, "Coupling without
Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.methods.base import Outcome, RoundInput
from common.sampling import apply_text, choose, shape
from common.stopping import first_stop
from common.types import CorrectionKind


class CoupledMethod:
    def verify(self, round_input: RoundInput) -> Outcome:
        draft_tokens, draft_probs = round_input.draft_tokens, round_input.draft_probs
        ratios: list[float] = []  # min(1, p/q) of the positions judged
        sample, accepted_len = -1, 0
        for sample, scores in _samples(round_input):
            if accepted_len == len(draft_tokens):
                break
            drafted = draft_tokens[accepted_len]
            if draft_probs:
                target_prob = float(sample == drafted) if scores is None else _prob(scores, drafted)
                ratios.append(min(1.0, target_prob / draft_probs[accepted_len]))
            if sample != drafted:
                break
            accepted_len += 1
        stop = first_stop(draft_tokens[:accepted_len], round_input.stop_ids)
        if stop is not None:  # nothing after it is accepted, and there is nothing to correct
            return Outcome(stop + 1, 0, CorrectionKind.NONE, _mean(ratios[: stop + 1]))
        is_full = accepted_len == len(draft_tokens)
        return Outcome(
            accepted_len=accepted_len,
            correction=sample,
            correction_kind=CorrectionKind.BONUS if is_full else CorrectionKind.CORRECTION,
            alpha_mean=_mean(ratios),
        )


def _samples(round_input: RoundInput) -> Iterator[tuple[int, NDArray[np.float32] | None]]:
    """The target's token after each row, in order, and the scores [vocab] it came from (None: greedy).

    Greedy rows are cheap together; scores and noise are made only as they are asked for.
    """
    sampling, first = round_input.sampling, round_input.position
    rows: NDArray[np.float32] = apply_text(
        np,
        round_input.logits,
        sampling,
        prompt_ids=round_input.prompt_ids,
        output_ids=round_input.output_ids,
        draft_token_ids=round_input.draft_tokens,
        eos_token_ids=round_input.eos_token_ids,
        num_tokens=round_input.num_tokens,
    )
    if sampling.temperature == 0.0:
        for sample in choose(rows, sampling, range(first, first + len(rows))).tolist():
            yield sample, None
        return
    for row in range(len(rows)):
        scores = shape(np, rows[row : row + 1], sampling)
        yield int(choose(scores, sampling, (first + row,))[0]), scores[0]


def _prob(scores: NDArray[np.float32], token_id: int) -> float:
    largest = scores.max()
    return float(np.exp(scores[token_id] - largest) / np.exp(scores - largest).sum())


def _mean(ratios: list[float]) -> float:
    """NaN where nothing was judged, or the edge sent no q."""
    return sum(ratios) / len(ratios) if ratios else math.nan
