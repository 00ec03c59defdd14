"""A textbook speculative sampler, right or with one of the mistakes that implementations were published with.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1. Written
apart from the product, so that the enumeration is checked by something it must call exact too.
"""

from __future__ import annotations

import enum
import math

from outrider.cloud_verifier.verification.methods.base import NoiseKey, Outcome, RoundInput
from outrider.common.noise.draws import Purpose
from outrider.common.types import CorrectionKind, Support


class Mistake(enum.StrEnum):
    NONE = "none"
    INVERTED_RATIO = "ratio q/p instead of p/q"
    LOGITS_SUBTRACTED = "residual of p and log q instead of p and q"
    PLAIN_CORRECTION = "correction from p, the rejected token included"
    SCALAR_RESIDUAL = "correction from p without the rejected token"
    KEPT_AFTER_REJECTION = "accepted tokens counted past a rejection"
    BONUS_OF_LAST_TOKEN = "bonus from the row of the last draft token"


class PlantedMethod:
    def __init__(self, mistake: Mistake = Mistake.NONE) -> None:
        self._mistake = mistake

    def verify(self, round_input: RoundInput) -> Outcome:
        count, num_draft_tokens = self._count_accepted(round_input), len(round_input.draft_tokens)
        if count < num_draft_tokens:
            return Outcome(count, self._correct(round_input, count), CorrectionKind.CORRECTION, math.nan)
        is_off = self._mistake is Mistake.BONUS_OF_LAST_TOKEN and count > 0
        key = NoiseKey(Purpose.COUPLED, round_input.position + count)
        bonus = round_input.rows.sample(count - is_off, key)
        return Outcome(count, bonus, CorrectionKind.BONUS, math.nan)

    def _count_accepted(self, round_input: RoundInput) -> int:
        num_accepted = 0
        for index in range(len(round_input.draft_tokens)):
            if self._is_accepted(round_input, index):
                num_accepted += 1
            elif self._mistake is not Mistake.KEPT_AFTER_REJECTION:
                break
        return num_accepted

    def _is_accepted(self, round_input: RoundInput, index: int) -> bool:
        drafted = round_input.draft_tokens[index]
        (log_prob,) = round_input.rows.log_probs(index, (drafted,))
        ratio = math.exp(log_prob) / _probs(round_input.supports[index])[drafted]
        if self._mistake is Mistake.INVERTED_RATIO:
            ratio = 1.0 / ratio if ratio else math.inf
        return round_input.draws.accepts(ratio, index)

    def _correct(self, round_input: RoundInput, row: int) -> int:
        rows, draft_probs = round_input.rows, _probs(round_input.supports[row])
        key = NoiseKey(Purpose.RESIDUAL, round_input.position, row)
        if self._mistake is Mistake.PLAIN_CORRECTION:
            return rows.sample(row, key)
        if self._mistake is Mistake.SCALAR_RESIDUAL:
            return rows.sample(row, key, {round_input.draft_tokens[row]: -math.inf})
        if self._mistake is Mistake.LOGITS_SUBTRACTED:
            draft_probs = {i: math.log(q) for i, q in draft_probs.items()}
        log_probs = rows.log_probs(row, tuple(draft_probs))
        left = {i: math.exp(lp) - draft_probs[i] for i, lp in zip(draft_probs, log_probs, strict=True)}
        return rows.sample(row, key, {i: math.log(p) if p > 0 else -math.inf for i, p in left.items()})


class RedrawnCoupling:
    """`coupled` but for one mistake: where the draft is not the target's own sample, another one is drawn."""

    def verify(self, round_input: RoundInput) -> Outcome:
        rows, draft_tokens = round_input.rows, round_input.draft_tokens
        for index, drafted in enumerate(draft_tokens):
            if rows.target_sample(index) != drafted:
                key = NoiseKey(Purpose.RESIDUAL, round_input.position, index)
                return Outcome(index, rows.sample(index, key), CorrectionKind.CORRECTION, math.nan)
        count = len(draft_tokens)
        return Outcome(count, rows.target_sample(count), CorrectionKind.BONUS, math.nan)


def _probs(support: Support) -> dict[int, float]:
    total = sum(support.weights)
    return {i: weight / total for i, weight in zip(support.token_ids, support.weights, strict=True)}
