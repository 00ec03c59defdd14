"""Which tokens of which work go into the next packed forward. Pure: integers in, integers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Schedulable(Protocol):
    @property
    def num_pending(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    """What one work feeds in a step. `is_final`: its logits are read, the work can be answered."""

    index: int
    num_tokens: int
    is_final: bool


def plan_step(works: Sequence[Schedulable], max_step_tokens: int) -> list[Share]:
    """Rounds first, then prefill chunks, under a token budget; in order of arrival within each.

    Work that fits is fed whole; larger work gets a chunk of what is left, so that a long prompt never
    holds up the rounds of others for more than one chunk. At least one share is returned
    when there is work, whatever the budget: a round is never split below its logit rows.
    """
    shares: list[Share] = []
    budget = max_step_tokens
    by_size = sorted(range(len(works)), key=lambda i: works[i].num_pending > works[i].num_logit_rows + 64)
    for i in by_size:
        pending, rows = works[i].num_pending, works[i].num_logit_rows
        if pending <= budget or (not shares and pending == rows):
            shares.append(Share(i, pending, is_final=True))
            budget -= pending
        elif (chunk := min(budget, pending - rows)) > 0:
            shares.append(Share(i, chunk, is_final=False))
            budget -= chunk
        if budget <= 0:
            break
    return shares
