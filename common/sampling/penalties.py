"""The processors that depend on the sequence so far, and the fixed biases. All change `scores` in place.

Row i follows the sequence and `draft_token_ids[:i]`. A row's result must not depend on which tokens are
drafts and which are committed, to the last bit: the same sequence is computed again with other splits.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.sampling.arrays import native
from outrider.common.sampling.history import BadWords, TokenCounts


def apply_repetition_penalty(
    xp: Any, scores: Any, penalty: float, seen: TokenCounts, draft_token_ids: Sequence[int]
) -> None:
    """Divides positive scores of seen tokens by `penalty`, multiplies negative ones (Keskar et al. 2019)."""
    rows, ids, _ = _drafted_before(scores.shape[0], draft_token_ids, seen)
    for where in ((slice(None), seen.ids), (rows, ids)):
        index = tuple(native(xp, each, scores) if isinstance(each, np.ndarray) else each for each in where)
        picked = scores[index]
        scores[index] = xp.where(picked < 0, picked * penalty, picked / penalty)


def apply_count_penalties(
    xp: Any,
    scores: Any,
    presence: float,
    frequency: float,
    output: TokenCounts,
    draft_token_ids: Sequence[int],
) -> None:
    """Subtracts frequency * count and then presence from scores of tokens in the output (OpenAI's API)."""
    rows, ids, drafted = _drafted_before(scores.shape[0], draft_token_ids)
    committed = np.array([output.amount(token_id) for token_id in ids.tolist()], np.float32)
    base = native(xp, output.ids, scores)
    rows, ids = native(xp, rows, scores), native(xp, ids, scores)
    untouched = scores[rows, ids]
    scores[:, base] = scores[:, base] - frequency * native(xp, output.amounts, scores) - presence
    scores[rows, ids] = untouched - frequency * native(xp, committed + drafted, scores) - presence


def _drafted_before(
    num_rows: int, draft_token_ids: Sequence[int], but_not: Container[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Returns (row, id, count) of each id drafted before each row."""
    entries: list[tuple[int, int, int]] = []
    counts: dict[int, int] = {}
    for row, token_id in enumerate(draft_token_ids[: num_rows - 1], start=1):
        counts[token_id] = counts.get(token_id, 0) + 1
        entries += [(row, each, count) for each, count in counts.items() if each not in but_not]
    table = np.array(entries, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.float32)


def apply_bias(xp: Any, scores: Any, bias_ids: NDArray[np.int64], biases: NDArray[np.float32]) -> None:
    """Adds a bias to single ids, each listed once."""
    ids = native(xp, bias_ids, scores)
    scores[:, ids] = scores[:, ids] + native(xp, biases, scores)


def apply_bad_words(
    xp: Any, scores: Any, bad_words: BadWords, text_end: Sequence[int], draft_token_ids: Sequence[int]
) -> None:
    """Masks the last token of a word wherever the sequence before it ends with the rest of the word.

    `text_end` are the last tokens of the text, as many as the longest word has.
    """
    text = (*text_end, *draft_token_ids)
    for row in range(scores.shape[0]):
        for ids in bad_words.completing(text, len(text_end) + row):
            scores[row, native(xp, ids, scores)] = -math.inf


def mask_end_of_text(scores: Any, eos_token_ids: Iterable[int], num_rows: int) -> None:
    """Masks the end-of-text ids in the first `num_rows` rows: the sequence is too short to end there."""
    for token_id in eos_token_ids:
        scores[:num_rows, token_id] = -math.inf
