"""Holds the rows of scores that a model gives after tokens, and the softmax that draws and signals need of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.rows.dropout import Candidates

_EXCLUDED = np.float32(-np.inf)
_LEAST_TOTAL = 1e-20  # of probabilities in float32, the smallest of which have 38 digits after the point
_LEAST = np.float32(-1e30)  # no model's logit; times a probability of 0 it is 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds the scores for the tokens after k others, each float32 `[k, num_tokens]`; of a chain k is 1."""

    logits: NDArray[np.float32]
    probs: NDArray[np.float32]  # softmax(logits)
    tempered_logits: NDArray[np.float32]  # logits / temperature
    tempered_probs: NDArray[np.float32]  # softmax(tempered_logits)
    candidates: Candidates | None = None  # under dropout, where the variant of the graph runs
    is_constrained: bool = False  # ids that a grammar excludes are at -inf
    hidden: NDArray[np.float32] | None = (
        None  # [k, hidden_size], what the head reads, where a head is learned
    )

    def one(self, index: int) -> Rows:
        """Returns a single row."""
        chosen = slice(index, index + 1)
        return Rows(
            self.logits[chosen], self.probs[chosen], self.tempered_logits[chosen], self.tempered_probs[chosen]
        )


def constrained(rows: Rows, words: NDArray[np.int32], temperature: float) -> Rows:
    """Returns a single row over the ids that `words` [n] allow (`outrider.common.grammar.masks`)."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=rows.logits.shape[1])
    allowed = bits.view(np.bool_)
    logits = np.where(allowed, rows.logits, _EXCLUDED)
    kept = rows.probs * allowed
    total = kept.sum()
    if not total > _LEAST_TOTAL:  # what is left of the softmax has no digits
        return replace(rows_of(logits, temperature), candidates=rows.candidates, is_constrained=True)
    kept /= total
    if rows.tempered_logits is rows.logits:
        return Rows(logits, kept, logits, kept, rows.candidates, is_constrained=True)
    tempered = rows.tempered_probs * allowed
    tempered_total = tempered.sum()
    if not tempered_total > _LEAST_TOTAL:
        return replace(rows_of(logits, temperature), candidates=rows.candidates, is_constrained=True)
    tempered /= tempered_total
    tempered_logits = np.where(allowed, rows.tempered_logits, _EXCLUDED)
    return Rows(logits, kept, tempered_logits, tempered, rows.candidates, is_constrained=True)


def finite(rows: Rows) -> NDArray[np.float32]:
    """Returns the logits [num_tokens] of a single row such that each times its probability is a number."""
    logits: NDArray[np.float32] = rows.logits[0]
    return np.maximum(logits, _LEAST) if rows.is_constrained else logits


def rows_of(logits: NDArray[np.float32], temperature: float) -> Rows:
    """Returns the rows of logits `[k, num_tokens]` where the model gives nothing else; at temperature 0 nothing is
    tempered."""
    probs = _softmax(logits)
    if temperature in (0.0, 1.0):
        return Rows(logits, probs, logits, probs)
    tempered = logits / np.float32(temperature)
    return Rows(logits, probs, tempered, _softmax(tempered))


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights
