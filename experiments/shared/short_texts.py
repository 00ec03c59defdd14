"""Predicts short texts by the cost model, from parts measured in their rounds.

A plan is for long texts. In short ones the ends count: the last round is cut to what is wanted, and asking
for a stream costs one round trip.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from outrider.edge_client.controller.cost_model import (
    LinkCosts,
    ModelCosts,
    cloud_only_s,
    colocated_models,
    rounds_s,
)
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.samples import (
    AcceptanceSequence,
    acceptance_by_position,
    cost_line,
    replay_rounds,
)


class MeasuredRound(Protocol):
    """Is what `RoundRecord` and the sweeps' `RoundRow` have in common, as far as it is asked for here."""

    @property
    def num_draft_tokens(self) -> int:
        """Returns the tokens drafted."""

    @property
    def draft_ms(self) -> float:
        """Returns the draft's time."""

    @property
    def queue_ms(self) -> float:
        """Returns the time queued at the verifier."""

    @property
    def forward_ms(self) -> float:
        """Returns the target's time."""

    @property
    def verifier_ms(self) -> float:
        """Returns all of the verifier's time."""


def models_of(
    rounds: Sequence[MeasuredRound],
    *,
    stream_forward_s: float,
    colocated_rounds: Sequence[MeasuredRound] = (),
) -> ModelCosts:
    """Fits drafting and verifying as `edge-client plan --measure` does, to answered rounds. A step of the
    target alone is a forward of its stream and what the verifier does beside one, without any draft."""
    drafted = [(each.num_draft_tokens, each.draft_ms / 1e3) for each in rounds if each.num_draft_tokens]
    draft_fixed, draft_token = cost_line(drafted, is_flat=False)
    verified = [(each.num_draft_tokens, each.verifier_ms / 1e3) for each in rounds]
    verify_fixed, verify_token = cost_line(verified, is_flat=True)
    beside = [(r.num_draft_tokens, (r.verifier_ms - r.queue_ms - r.forward_ms) / 1e3) for r in rounds]
    num_there = sum(each.num_draft_tokens for each in colocated_rounds)
    return ModelCosts(
        draft_token_s=draft_token.value,
        target_token_s=stream_forward_s + cost_line(beside, is_flat=True)[0].value,
        verify_fixed_s=verify_fixed.value,
        verify_token_s=verify_token.value,
        colocated_draft_token_s=sum(r.draft_ms for r in colocated_rounds) / 1e3 / num_there
        if num_there
        else None,
        draft_fixed_s=draft_fixed.value,
    )


def tree_token_s(num_accepted: Sequence[int], num_tokens: int, tree_s: float, alone_s: float) -> float:
    """Returns the seconds a token of the `num_tokens` after a text's first, where rounds are trees and take `tree_s`,
    or `alone_s` where nothing is drafted for the last token. `num_accepted` are the accepted tokens of such rounds."""
    chances = {n: count / len(num_accepted) for n, count in Counter(num_accepted).items()}
    left_s = [0.0]  # by tokens left to commit
    for left in range(1, num_tokens + 1):
        after_s = sum(chance * left_s[left - min(n, left - 1) - 1] for n, chance in chances.items())
        left_s.append((tree_s if left > 1 else alone_s) + after_s)
    return left_s[num_tokens] / num_tokens


def alphas_of(texts: Sequence[AcceptanceSequence], num_draft_tokens: int) -> list[float]:
    """Returns acceptance by position, in rounds of this length through the texts."""
    return [each.value for each in acceptance_by_position(replay_rounds(texts, num_draft_tokens))]


def text_token_s(
    mode: ExecutionMode,
    num_draft_tokens: int,
    alphas: Sequence[float],
    num_tokens: int,
    models: ModelCosts,
    link: LinkCosts,
) -> float:
    """Returns the seconds a token of the `num_tokens` after a text's first, which comes with the opening.
    Edge-only, the first ones come with it: `num_draft_tokens` at once, again and again."""
    match mode:
        case ExecutionMode.CLOUD_ONLY:
            return cloud_only_s(models, link) + link.rtt_s / num_tokens
        case ExecutionMode.CO_LOCATED:
            there = colocated_models(models)
            there_s = rounds_s(alphas, num_draft_tokens, num_tokens, there, LinkCosts(0.0))
            return (there_s + link.rtt_s) / num_tokens
        case ExecutionMode.EDGE_ONLY:
            num_drafts = math.ceil((num_tokens + 1) / num_draft_tokens) - 1
            return num_drafts * models.draft_s(num_draft_tokens) / num_tokens
        case _:
            return rounds_s(alphas, num_draft_tokens, num_tokens, models, link) / num_tokens
