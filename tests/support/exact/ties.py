"""Tie-aware comparison of greedy text (docs/design.md §7, numerics).

Two float32 forwards of different batch shapes differ by about 2e-5, so two tokens whose scores lie within
`TIE_MARGIN` may swap. A tie is counted and the reference's token forced; anything else is a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

TIE_MARGIN = 1e-4
MAX_TIE_SHARE = 1e-4  # more than 1 in 10,000 fails


@dataclass
class TieCounter:
    """Compares one token at a time; `check` ends a test."""

    num_tokens: int = 0
    num_ties: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, scores: NDArray[np.float32], reference_token: int) -> int:
        """Count `scores` [vocab_size] against the reference's choice; returns the token to go on with."""
        self.num_tokens += 1
        ours = int(scores.argmax())
        if ours != reference_token:
            gap = float(scores[ours]) - float(scores[reference_token])
            if gap <= TIE_MARGIN:
                self.num_ties += 1
            else:
                self.differences.append(
                    f"token {self.num_tokens}: {ours} not {reference_token}, gap {gap:.2e}"
                )
        return reference_token

    def compare_all(self, rows: Iterable[NDArray[np.float32]], reference: Sequence[int]) -> None:
        for row, token in zip(rows, reference, strict=True):
            self.compare(row, token)

    def check(self) -> None:
        """Raise AssertionError on a difference, or on too many ties (one is always allowed)."""
        print(f"{self.num_ties} ties in {self.num_tokens} tokens")
        assert not self.differences, self.differences[:5]
        assert self.num_ties <= max(1.0, self.num_tokens * MAX_TIE_SHARE), f"{self.num_ties} ties"
