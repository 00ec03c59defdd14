"""The processors that look at the text so far, and the fixed biases. All change `scores` in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.types import SamplingParams, TokenIds


def apply_penalties(
    xp: Any,
    scores: Any,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    draft_token_ids: Sequence[int],
) -> None:
    """Repetition (Keskar et al. 2019, as Hugging Face computes it) over prompt and output, then frequency
    and presence (OpenAI's, as vLLM computes them) over the output; row i sees `draft_token_ids[:i]` too."""
    if params.repetition_penalty != 1:
        penalty = float(np.float32(params.repetition_penalty))
        seen = set(prompt_ids) | set(output_ids)
        for row, ids in _each_row(scores, seen, draft_token_ids):
            picked = row[ids]
            row[ids] = xp.where(picked < 0, picked * penalty, picked / penalty)
    if params.frequency_penalty or params.presence_penalty:
        frequency = float(np.float32(params.frequency_penalty))
        presence = float(np.float32(params.presence_penalty))
        counts = Counter(output_ids)
        for index in range(scores.shape[0]):
            if index:
                counts[draft_token_ids[index - 1]] += 1
            if not counts:
                continue
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            amount = xp.asarray(np.fromiter(counts.values(), np.float32, len(counts)))
            row = scores[index]
            row[ids] = row[ids] - frequency * amount - presence


def _each_row(scores: Any, seen: set[int], draft_token_ids: Sequence[int]) -> Any:
    for index in range(scores.shape[0]):
        if index:
            seen = seen | {draft_token_ids[index - 1]}
        if seen:
            yield scores[index], np.fromiter(seen, np.int64, len(seen))


def apply_bias(xp: Any, scores: Any, logit_bias: Sequence[tuple[int, float]]) -> None:
    """Add a bias to single ids; each id is given once."""
    ids = np.array([token_id for token_id, _ in logit_bias], np.int64)
    bias = xp.asarray(np.array([bias for _, bias in logit_bias], np.float32))
    scores[:, ids] = scores[:, ids] + bias


def apply_bad_words(
    scores: Any, bad_words: Sequence[TokenIds], text_ids: Sequence[int], draft_token_ids: Sequence[int]
) -> None:
    """Mask the last token of a word wherever the text before it ends with the rest of the word."""
    longest = max(len(word) for word in bad_words) - 1
    tail = tuple(text_ids[len(text_ids) - min(longest, len(text_ids)) :])
    for index in range(scores.shape[0]):
        text = tail + tuple(draft_token_ids[:index])
        for word in bad_words:
            if len(word) == 1 or text[len(text) - len(word) + 1 :] == word[:-1] and len(text) >= len(word) - 1:
                scores[index, word[-1]] = -math.inf


def mask_end_of_text(scores: Any, eos_token_ids: Sequence[int], num_rows: int) -> None:
    """Mask the end-of-text ids in the first `num_rows` rows: the text is too short to end there."""
    for token_id in eos_token_ids:
        scores[:num_rows, token_id] = -math.inf
