"""Shared by the methods: rejection in order of a chain, and the end of a round.

A node is an index into the draft, `ROOT` the sequence before it. The token after a node is judged by row node + 1: of
a chain draft token i by row i.

A ratio is p/q of a drafted token, target over draft. A token that is accepted with probability min(1, p/q) is
judged by a uniform draw keyed (seed, start, offset): docs/design.md §5, "Randomness".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.common.tree import ROOT
from outrider.common.types import CorrectionKind


def row_of(round_input: RoundInput, index: int) -> int:
    """Returns the row that the draft token at `index` is judged by."""
    return index if round_input.tree is None else round_input.tree.parents[index] + 1


def target_prob(round_input: RoundInput, index: int) -> float:
    """Returns p of the draft token at `index`, after those before it or on its path."""
    row = row_of(round_input, index)
    (log_prob,) = round_input.rows.log_probs(row, (round_input.draft_tokens[index],))
    return math.exp(log_prob)


def judge_in_order(round_input: RoundInput, accepts: Callable[[int], bool]) -> range:
    """Returns the accepted tokens: up to the first that `accepts` rejects, or to a stop id."""
    for index, token_id in enumerate(round_input.draft_tokens):
        if not accepts(index):
            return range(index)
        if token_id in round_input.stop_ids:
            return range(index + 1)
    return range(len(round_input.draft_tokens))


def reject_in_order(round_input: RoundInput, draft_probs: Sequence[float]) -> tuple[range, list[float]]:
    """Accepts draft token i with probability min(1, p/q), up to the first that is rejected.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1; Chen et
    al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2. Returns the
    accepted tokens, and min(1, p/q) of those judged.
    """
    ratios: list[float] = []

    def accepts(index: int) -> bool:
        ratio = target_prob(round_input, index) / draft_probs[index]
        ratios.append(min(1.0, ratio))
        return round_input.draws.accepts(ratio, index)

    return judge_in_order(round_input, accepts), ratios


def conclude(
    round_input: RoundInput,
    accepted: Sequence[int],
    ratios: Sequence[float],
    correct: Callable[[int], int],
    *,
    has_always_bonus: bool = False,
) -> Outcome:
    """Returns the outcome for the accepted nodes: the first ones of a chain, or a path of a tree. `correct(row)`
    samples the correction.

    Nothing follows an accepted stop id or all of a draft that was cut, and no bonus is sampled where the next round has
    been sent already, unless `has_always_bonus`.
    """
    row = accepted[-1] + 1 if accepted else 0
    kind, token_id = ending(round_input, accepted, has_always_bonus=has_always_bonus), 0
    if kind is CorrectionKind.CORRECTION:
        token_id = correct(row)
    elif kind is CorrectionKind.BONUS:
        token_id = round_input.rows.target_sample(row)
    nodes = () if round_input.tree is None else tuple(accepted)
    return Outcome(len(accepted), token_id, kind, mean_ratio(ratios), nodes)


def ending(
    round_input: RoundInput, accepted: Sequence[int], *, has_always_bonus: bool = False
) -> CorrectionKind:
    """Returns the kind of token that follows the accepted nodes."""
    tree, draft_tokens, last = round_input.tree, round_input.draft_tokens, accepted[-1] if accepted else ROOT
    if last != ROOT and round_input.is_last(last):
        return CorrectionKind.NONE
    has_next = last + 1 < len(draft_tokens) if tree is None else bool(tree.children(last))
    if has_next:
        return CorrectionKind.CORRECTION
    has_bonus = has_always_bonus or not round_input.is_pipelined
    return CorrectionKind.BONUS if has_bonus else CorrectionKind.NONE


def mean_ratio(ratios: Sequence[float]) -> float:
    """Returns `alpha_mean`: NaN where nothing was judged, or the edge sent no q."""
    return sum(ratios) / len(ratios) if ratios else math.nan
