"""The input and the answer of a verification method.

A method only decides: all numbers come from `TargetRows`, all chance from `TargetRows.sample` and
`UniformDraws`. So its code is the same over numpy, a GPU or an exact enumeration of every random outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from outrider.common.noise.draws import Purpose
from outrider.common.tree import Tree
from outrider.common.types import Candidate, CorrectionKind, MethodParams, Support, TokenIds


@dataclass(slots=True)  # not frozen: see RoundMetrics
class NoiseKey:
    """Names the row of noise that a sample is drawn with, beside the session's seed (docs/design.md §5)."""

    purpose: Purpose
    position: int
    index: int = 0


class Resampling(Enum):
    """Says which samples, besides the target's own, a method may ask for: so that a GPU draws them with those."""

    NONE = auto()
    RESIDUAL = auto()  # ∝ max(p − q, 0), after each drafted child of the row in turn: see `supports`
    BLOCK_RESIDUAL = auto()  # ∝ max(c p − q, 0): see `block`
    WITHOUT_DRAFTED = auto()  # of p without the drafted token
    CANDIDATES = auto()  # several of p


class TargetRows(Protocol):
    """Computes one session's processed rows of a step when they are read.

    Row 0 is the target's distribution p of the token after the sequence, row i + 1 of the one after draft token i
    and what is before that. At temperature 0 p is 1 at the argmax.
    """

    def log_probs(self, row: int, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns log p of these ids; −inf where truncation or a bad word removed them."""

    def entropy(self, row: int) -> float:
        """Returns H(p) in nats."""

    def target_sample(self, row: int) -> int:
        """Returns the target's token as cloud-only decodes it: a sample of p keyed (COUPLED, its position)."""

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        """Returns a sample ∝ exp(w), w = `changed`[id] where given and log p elsewhere: argmax of w + noise.

        Where every w is −inf (by rounding alone) it is a sample of p.
        """


class UniformDraws(Protocol):
    """Draws a round's uniform numbers, keyed by the session's seed and the round's start."""

    def accepts(self, probability: float, offset: int) -> bool:
        """Returns whether uniform(seed, start, offset, ACCEPT) < `probability`; `offset` is a draft index,
        and so another one for each sibling of a tree."""


@dataclass(slots=True)  # not frozen: see RoundMetrics
class RoundInput:
    """Holds one draft to be judged, and the target's rows for it."""

    rows: TargetRows  # num_draft_tokens + 1 of them; without the last one where the draft is cut
    draws: UniformDraws
    position: int  # length of the sequence before the draft: the `start` of the keys
    draft_tokens: TokenIds
    draft_probs: tuple[float, ...]  # q of each draft token, or empty
    supports: tuple[Support, ...]  # the draft's own distribution at each row before a draft token, or empty
    stop_ids: frozenset[int]  # each of these tokens ends the sequence
    method_params: MethodParams
    candidates_from: int = 0
    is_pipelined: bool = False  # the next round has been sent: no bonus, except with `coupled`
    tree: Tree | None = None  # of the draft tokens, where they are no chain
    is_cut: bool = False  # the draft went on: its last token has no row, and nothing follows it in this round

    def is_last(self, node: int) -> bool:
        """Returns whether nothing follows a draft token in this round: it ends the sequence, or has no row."""
        has_no_row = self.is_cut and node == len(self.draft_tokens) - 1
        return has_no_row or self.draft_tokens[node] in self.stop_ids


@dataclass(slots=True)  # not frozen: see RoundMetrics
class Outcome:
    """Contains a method's decision: how many tokens are accepted, and the token after them.

    There is none where its kind is NONE: the sequence ended with a stop token, no bonus was wanted, the draft was cut
    and what is left of it is accepted, or (with `candidates`) the edge chooses the correction.
    """

    accepted_len: int
    correction: int
    correction_kind: CorrectionKind
    alpha_mean: float  # mean min(1, p/q) over the positions judged; NaN when none was
    accepted_nodes: tuple[int, ...] = ()  # of a tree: the indices of the accepted draft tokens
    candidates: tuple[Candidate, ...] = ()


class VerificationMethod(Protocol):
    """Judges drafts without state: a round that is verified again has the same outcome."""

    resampling: Resampling = Resampling.NONE

    def verify(self, round_input: RoundInput) -> Outcome:
        """Returns which draft tokens are accepted and what follows them."""
