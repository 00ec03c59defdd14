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
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.methods.base import Outcome, RoundInput
from common.sampling import choose, process_logits
from common.stopping import first_stop
from common.types import CorrectionKind


class CoupledMethod:
    def verify(self, round_input: RoundInput) -> Outcome:
        draft_tokens = round_input.draft_tokens
        scores = _processed_scores(round_input)
        sample, accepted_len = -1, 0
        for sample, drafted in zip_longest(_samples(round_input, scores), draft_tokens):
            if sample != drafted:
                break
            accepted_len += 1
        stop = first_stop(draft_tokens[:accepted_len], round_input.stop_ids)
        if stop is not None:  # nothing after it is accepted, and there is nothing to correct
            alpha_mean = _alpha_mean(round_input, scores, accepted_len, stop + 1)
            return Outcome(stop + 1, 0, CorrectionKind.NONE, alpha_mean)
        is_full = accepted_len == len(draft_tokens)
        return Outcome(
            accepted_len=accepted_len,
            correction=sample,
            correction_kind=CorrectionKind.BONUS if is_full else CorrectionKind.CORRECTION,
            alpha_mean=_alpha_mean(round_input, scores, accepted_len, accepted_len + (not is_full)),
        )


def _processed_scores(round_input: RoundInput) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = process_logits(
        np,
        round_input.logits,
        round_input.sampling,
        prompt_ids=round_input.prompt_ids,
        output_ids=round_input.output_ids,
        draft_token_ids=round_input.draft_tokens,
        eos_token_ids=round_input.eos_token_ids,
        num_tokens=round_input.num_tokens,
    )
    return scores


def _samples(round_input: RoundInput, scores: NDArray[np.float32]) -> Iterator[int]:
    """The target's token after each row, in order: greedy rows all at once, noise only as it is asked for."""
    sampling, first = round_input.sampling, round_input.position
    if sampling.temperature == 0.0:
        yield from choose(scores, sampling, range(first, first + len(scores))).tolist()
        return
    for row in range(len(scores)):
        yield int(choose(scores[row : row + 1], sampling, (first + row,))[0])


def _alpha_mean(
    round_input: RoundInput, scores: NDArray[np.float32], accepted_len: int, num_judged: int
) -> float:
    """Mean of min(1, p/q) over the first `num_judged` draft tokens; NaN without q or without any."""
    if num_judged == 0 or not round_input.draft_probs:
        return math.nan
    if round_input.sampling.temperature == 0.0:  # p is 1 or 0
        return min(accepted_len, num_judged) / num_judged
    rows = scores[:num_judged]
    drafted = np.asarray(round_input.draft_tokens[:num_judged])
    largest = rows.max(axis=-1)
    weights = np.exp(rows[np.arange(num_judged), drafted] - largest)
    target_probs = weights / np.exp(rows - largest[:, None]).sum(axis=-1)
    draft_probs = np.asarray(round_input.draft_probs[:num_judged], dtype=np.float64)
    return float(np.minimum(1.0, target_probs / draft_probs).mean())
