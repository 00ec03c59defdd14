"""Shared by the methods for chains: rejection in order, and the end of a round.

A ratio is p/q of a drafted token, target over draft. A token that is accepted with probability min(1, p/q) is
judged by a uniform draw keyed (seed, start, offset): docs/design.md §5, "Randomness".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.common.types import CorrectionKind


def target_prob(round_input: RoundInput, index: int) -> float:
    """Returns p of the draft token at `index`."""
    (log_prob,) = round_input.rows.log_probs(index, (round_input.draft_tokens[index],))
    return math.exp(log_prob)


def judge_in_order(round_input: RoundInput, accepts: Callable[[int], bool]) -> int:
    """Returns the number of accepted tokens: up to the first that `accepts` rejects, or to a stop id."""
    for index, token_id in enumerate(round_input.draft_tokens):
        if not accepts(index):
            return index
        if token_id in round_input.stop_ids:
            return index + 1
    return len(round_input.draft_tokens)


def reject_in_order(round_input: RoundInput, draft_probs: Sequence[float]) -> tuple[int, list[float]]:
    """Accepts draft token i with probability min(1, p/q), up to the first that is rejected.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1; Chen et
    al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2. Returns the
    number accepted, and min(1, p/q) of those judged.
    """
    ratios: list[float] = []

    def accepts(index: int) -> bool:
        ratio = target_prob(round_input, index) / draft_probs[index]
        ratios.append(min(1.0, ratio))
        return round_input.draws.accepts(ratio, index)

    return judge_in_order(round_input, accepts), ratios


def conclude(
    round_input: RoundInput,
    accepted_len: int,
    ratios: Sequence[float],
    correct: Callable[[int], int],
    *,
    has_always_bonus: bool = False,
) -> Outcome:
    """Returns the outcome for a number of accepted tokens; `correct(row)` samples the correction.

    Nothing follows an accepted stop id, and no bonus is sampled where the next round has been sent already,
    unless `has_always_bonus`.
    """
    kind = ending(round_input, accepted_len, has_always_bonus=has_always_bonus)
    if kind is CorrectionKind.NONE:
        return Outcome(accepted_len, 0, kind, mean_ratio(ratios))
    is_bonus = kind is CorrectionKind.BONUS
    token_id = round_input.rows.target_sample(accepted_len) if is_bonus else correct(accepted_len)
    return Outcome(accepted_len, token_id, kind, mean_ratio(ratios))


def ending(round_input: RoundInput, accepted_len: int, *, has_always_bonus: bool = False) -> CorrectionKind:
    """Returns the kind of token that follows the accepted ones."""
    draft_tokens = round_input.draft_tokens
    if accepted_len and draft_tokens[accepted_len - 1] in round_input.stop_ids:
        return CorrectionKind.NONE
    if accepted_len < len(draft_tokens):
        return CorrectionKind.CORRECTION
    has_bonus = has_always_bonus or not round_input.is_pipelined
    return CorrectionKind.BONUS if has_bonus else CorrectionKind.NONE


def mean_ratio(ratios: Sequence[float]) -> float:
    """Returns `alpha_mean`: NaN where nothing was judged, or the edge sent no q."""
    return sum(ratios) / len(ratios) if ratios else math.nan
