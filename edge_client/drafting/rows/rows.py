"""Holds the rows of scores that a model gives after tokens, and the softmax that draws and signals need of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.drafting.rows.dropout import Candidates

_INFINITE = np.float32(-np.inf).view(np.int32)
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
    # Bad words left nothing that the grammar allows: end-of-text is allowed then, and they are not applied.
    is_ended: bool = False
    hidden: NDArray[np.float32] | None = (
        None  # [k, hidden_size], what the head reads, where a head is learned
    )

    def one(self, index: int) -> Rows:
        """Returns a single row."""
        chosen = slice(index, index + 1)
        return Rows(
            self.logits[chosen], self.probs[chosen], self.tempered_logits[chosen], self.tempered_probs[chosen]
        )


def allowed_by(words: NDArray[np.int32], num_tokens: int) -> NDArray[np.bool_]:
    """Returns which ids `words` [n] allow (`outrider.common.grammar.masks`): `[num_tokens]`."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=num_tokens).view(np.bool_)


def constrained(rows: Rows, is_allowed: NDArray[np.bool_], temperature: float) -> Rows:
    """Returns a single row over the allowed ids."""
    allowed = is_allowed.astype(np.float32)
    excluded = ((is_allowed.astype(np.int32) - 1) & _INFINITE).view(np.float32)  # -inf; 0 for what is allowed
    logits = rows.logits + excluded
    kept = _share(rows.probs, allowed)
    if rows.tempered_logits is rows.logits:
        tempered_logits, tempered = logits, kept
    else:
        tempered_logits, tempered = rows.tempered_logits + excluded, _share(rows.tempered_probs, allowed)
    if kept is None or tempered is None:
        return replace(rows_of(logits, temperature), candidates=rows.candidates, is_constrained=True)
    return Rows(logits, kept, tempered_logits, tempered, rows.candidates, is_constrained=True)


def _share(probs: NDArray[np.float32], allowed: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Returns the probabilities of what is allowed; None where what is left of the softmax has no digits."""
    total = float(probs[0] @ allowed)
    if not total > _LEAST_TOTAL:
        return None
    kept: NDArray[np.float32] = probs * allowed
    kept *= np.float32(1 / total)
    return kept


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
