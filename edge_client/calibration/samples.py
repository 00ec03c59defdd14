"""Collects the draft's signals at tokens that it drafts as a session does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.common.sequences import common_prefix
from outrider.common.types import SamplingParams, Signals
from outrider.edge_client.drafting.base import DraftModel


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one drafted token's signals. `is_right` says whether the text has the token there; None after a
    token that it does not have."""

    signals: Signals
    is_right: bool | None


def draft_along(
    draft: DraftModel,
    sampling: SamplingParams,
    num_support: int,
    prompt_ids: Sequence[int],
    text_ids: Sequence[int],
    num_draft_tokens: int,
) -> Iterator[Sample]:
    """Yields samples of rounds of `num_draft_tokens` along a given text: each round accepts the tokens that
    are the text's, and the next begins after those and one more.

    Along a target's own text these are the drafts of a session with `coupled`, token for token.
    """
    sequence = draft.sequence(sampling, num_prompt_tokens=len(prompt_ids), num_support=num_support)
    try:
        sequence.commit(prompt_ids)
        done = 0
        while done < len(text_ids):
            drafted = sequence.propose(min(num_draft_tokens, len(text_ids) - done))
            if not drafted.token_ids:  # the draft's context is full
                return
            theirs = text_ids[done : done + len(drafted.token_ids)]
            num_right = common_prefix(drafted.token_ids, theirs)
            for index, signals in enumerate(drafted.signals):
                yield Sample(signals, index < num_right if index <= num_right else None)
            sequence.commit(text_ids[done : done + num_right + 1])
            done += num_right + 1
    finally:
        sequence.close()
