"""What a verification method gets, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.types import CorrectionKind, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class RoundInput:
    """One session's rows of a step.

    `logits` [num_draft_tokens + 1, vocab_size] float32: row i is the target's prediction after the text
    and the first i draft tokens. Row i decides the token at index `position + i`.
    """

    logits: NDArray[np.float32]
    sampling: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # committed tokens after the prompt
    position: int  # length of the text before the draft
    draft_tokens: TokenIds
    draft_probs: tuple[float, ...]  # q of each draft token, or empty
    stop_ids: frozenset[int]  # a token of these ends the text
    eos_token_ids: TokenIds
    num_tokens: int  # ids at or above are masked


@dataclass(frozen=True, slots=True)
class Outcome:
    accepted_len: int
    correction: int
    correction_kind: CorrectionKind
    alpha_mean: float  # mean min(1, p/q) over the positions judged; NaN when none was


class VerificationMethod(Protocol):
    """Stateless: a verdict is a function of its input, so a replayed round gives the same one."""

    def verify(self, round_input: RoundInput) -> Outcome: ...
