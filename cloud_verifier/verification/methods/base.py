"""What a verification method gets, and what it answers.

A method is pure decisions: all numbers come from `TargetRows`, all chance from `TargetRows.sample` and
`Coins`. So its code is the same over numpy, a GPU or an exact enumeration of every random outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.common.noise.draws import Purpose
from outrider.common.types import Candidate, CorrectionKind, MethodParams, Support, TokenIds


@dataclass(slots=True)  # not frozen: see RoundMetrics
class NoiseKey:
    """Which row of noise a sample is drawn with (DESIGN §5, "Randomness"); the seed is the session's."""

    purpose: Purpose
    position: int
    index: int = 0


class TargetRows(Protocol):
    """One session's rows of a step, processed: row i is the target's distribution p of the token at index
    `position + i`, after the text and the first i draft tokens. At temperature 0 p is 1 at the argmax.
    Rows are computed as they are asked for.
    """

    def log_probs(self, row: int, token_ids: Sequence[int]) -> Sequence[float]:
        """log p of these ids; −inf where truncation or a bad word removed them."""

    def entropy(self, row: int) -> float:
        """H(p) in nats."""

    def own_sample(self, row: int) -> int:
        """The target's own token: a sample of p keyed (COUPLED, position + row), as cloud-only decodes it."""

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        """A sample ∝ exp(w), with w = `changed`[id] where given and log p elsewhere: argmax of w + noise.

        Where nothing is left (every w −inf, by rounding alone) it is a sample of p.
        """


class Coins(Protocol):
    """A session's keyed coins at one round's start."""

    def accepts(self, probability: float, offset: int) -> bool:
        """Whether uniform(seed, start, offset, ACCEPT) < `probability`; `offset` is a draft position."""


@dataclass(slots=True)  # not frozen: see RoundMetrics
class RoundInput:
    rows: TargetRows  # num_draft_tokens + 1 of them
    coins: Coins
    position: int  # length of the text before the draft: the `start` of the keys
    draft_tokens: TokenIds
    draft_probs: tuple[float, ...]  # q of each draft token, or empty
    supports: tuple[Support, ...]  # the draft's own distribution at each position, or empty
    stop_ids: frozenset[int]  # a token of these ends the text
    method_params: MethodParams
    candidates_from: int = 0
    is_pipelined: bool = False  # the next round is on its way: no bonus, but for `coupled`


@dataclass(slots=True)  # not frozen: see RoundMetrics
class Outcome:
    """`correction` stands after the accepted tokens unless its kind is NONE: then the text ended with a stop
    token, or the bonus was not wanted, or (with `candidates`) the edge chooses the correction.
    """

    accepted_len: int
    correction: int
    correction_kind: CorrectionKind
    alpha_mean: float  # mean min(1, p/q) over the positions judged; NaN when none was
    candidates: tuple[Candidate, ...] = ()


class VerificationMethod(Protocol):
    """Stateless: a verdict is a function of its input, so a replayed round gives the same one."""

    def verify(self, round_input: RoundInput) -> Outcome: ...
