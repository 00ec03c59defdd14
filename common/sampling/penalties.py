"""The processors that depend on the sequence so far, and the fixed biases. All change `scores` in place.

Row i follows the sequence and `draft_token_ids[:i]`. A row's result must not depend on which tokens are
drafts and which are committed, to the last bit: the same sequence is computed again with other splits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.sampling.arrays import native
from outrider.common.types import TokenIds


def apply_repetition_penalty(
    xp: Any, scores: Any, penalty: float, text_ids: Iterable[int], draft_token_ids: Sequence[int]
) -> None:
    """Divides positive scores of seen tokens by `penalty`, multiplies negative ones (Keskar et al. 2019)."""
    seen = set(text_ids)
    rows, ids, _ = _drafted_before(scores.shape[0], draft_token_ids, seen)
    for where in ((slice(None), _id_array(seen)), (rows, ids)):
        index = tuple(native(xp, each, scores) if isinstance(each, np.ndarray) else each for each in where)
        picked = scores[index]
        scores[index] = xp.where(picked < 0, picked * penalty, picked / penalty)


def apply_count_penalties(
    xp: Any,
    scores: Any,
    presence: float,
    frequency: float,
    output_ids: Iterable[int],
    draft_token_ids: Sequence[int],
) -> None:
    """Subtracts frequency * count and then presence from scores of tokens in the output (OpenAI's API)."""
    counts = Counter(output_ids)
    rows, ids, drafted = _drafted_before(scores.shape[0], draft_token_ids)
    committed = np.array([counts[token_id] for token_id in ids.tolist()], np.float32)
    amounts = np.fromiter(counts.values(), np.float32, len(counts))
    base = native(xp, _id_array(counts), scores)
    rows, ids = native(xp, rows, scores), native(xp, ids, scores)
    untouched = scores[rows, ids]
    scores[:, base] = scores[:, base] - frequency * native(xp, amounts, scores) - presence
    scores[rows, ids] = untouched - frequency * native(xp, committed + drafted, scores) - presence


def _id_array(ids: Any) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64, len(ids))


def _drafted_before(
    num_rows: int, draft_token_ids: Sequence[int], but_not: Iterable[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Returns (row, id, count) of each id drafted before each row."""
    entries: list[tuple[int, int, int]] = []
    counts: dict[int, int] = {}
    for row, token_id in enumerate(draft_token_ids[: num_rows - 1], start=1):
        counts[token_id] = counts.get(token_id, 0) + 1
        entries += [(row, each, count) for each, count in counts.items() if each not in but_not]
    table = np.array(entries, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.float32)


def apply_bias(xp: Any, scores: Any, logit_bias: Sequence[tuple[int, float]]) -> None:
    """Adds a bias to single ids, each listed once."""
    ids = native(xp, np.array([token_id for token_id, _ in logit_bias], np.int64), scores)
    bias = native(xp, np.array([bias for _, bias in logit_bias], np.float32), scores)
    scores[:, ids] = scores[:, ids] + bias


def apply_bad_words(
    scores: Any, bad_words: Sequence[TokenIds], text_ids: Sequence[int], draft_token_ids: Sequence[int]
) -> None:
    """Masks the last token of a word wherever the sequence before it ends with the rest of the word."""
    longest = max(len(word) for word in bad_words) - 1
    text = (*text_ids[max(len(text_ids) - longest, 0) :], *draft_token_ids)
    num_committed = len(text) - len(draft_token_ids)
    for row in range(scores.shape[0]):
        end = num_committed + row
        for *start, last in bad_words:
            if len(start) <= end and list(text[end - len(start) : end]) == start:
                scores[row, last] = -math.inf


def mask_end_of_text(scores: Any, eos_token_ids: Iterable[int], num_rows: int) -> None:
    """Masks the end-of-text ids in the first `num_rows` rows: the sequence is too short to end there."""
    for token_id in eos_token_ids:
        scores[:num_rows, token_id] = -math.inf
