"""Penalties, biases, bad words and grammars: found on the host as arrays of ids, then applied where the scores are.

What is found depends on the tokens alone, so that a GPU is sent the arrays of all sessions in one copy, before it has
the scores. Written once against the array namespace passed in, numpy or torch.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.common.grammar.masks import mask_scores
from outrider.common.grammar.state import GrammarLimitError, GrammarState
from outrider.common.sampling.history import BadWords, History
from outrider.common.types import SamplingParams


@functools.lru_cache(256)
def wire(value: float) -> float:
    """Returns a value as it is after the wire, in float32: both sides compute with that one."""
    return ctypes.c_float(value).value


_NO_IDS, _NO_AMOUNTS = np.empty(0, np.int64), np.empty(0, np.float32)
_NO_WORDS = np.empty((0, 0), np.int32)


class Penalties(NamedTuple):
    """Holds arrays of one namespace: ids changed in every row, and (rows, ids) changed there; empty where nothing is.

    Ids and rows are int64, amounts float32.
    """

    repetition: Any = _NO_AMOUNTS  # the penalty, [1]: CUDA multiplies with the reciprocal of what is no array
    seen_ids: Any = _NO_IDS  # by the repetition penalty
    seen_rows: Any = _NO_IDS  # of those that only the draft has
    seen_drafted_ids: Any = _NO_IDS
    output_ids: Any = _NO_IDS  # by presence and frequency, as often as they occur
    output_amounts: Any = _NO_AMOUNTS
    output_rows: Any = _NO_IDS  # instead of these, of drafted ones
    output_drafted_ids: Any = _NO_IDS
    output_drafted_amounts: Any = _NO_AMOUNTS
    bias_ids: Any = _NO_IDS
    biases: Any = _NO_AMOUNTS
    banned_rows: Any = _NO_IDS
    banned_ids: Any = _NO_IDS
    held_ids: Any = _NO_IDS  # stop ids, of the rows whose output is too short to end
    allowed: Any = _NO_WORDS  # by the grammar: int32 [rows, words], a bit for each id (`mask_scores`)


def find_penalties(
    params: SamplingParams,
    num_rows: int,
    history: History,
    text_end: Sequence[int],
    draft_token_ids: Sequence[int],
    is_short: bool = False,
) -> Penalties:
    """Returns numpy arrays for rows of which each sees the draft tokens before it: for the first rows alone where a
    grammar takes too much after a drafted token, `allowed` then says how many. Raises `GrammarLimitError` where it does
    before any.

    `text_end` are the last tokens of the text, as many as the longest bad word has; `is_short` is whether the first row
    follows an output that is too short to end.
    """
    if (state := history.grammar) is not None:
        allowed = _masks(state, num_rows, draft_token_ids)
        num_rows = len(allowed)
    found: dict[str, Any] = {"bias_ids": history.bias_ids, "biases": history.biases}
    if params.repetition_penalty != 1:
        found["repetition"] = np.array([params.repetition_penalty], np.float32)
        found["seen_ids"] = history.seen.ids
        found["seen_rows"], found["seen_drafted_ids"], _ = _drafted_before(
            num_rows, draft_token_ids, history.seen
        )
    if params.presence_penalty or params.frequency_penalty:
        output = history.output
        rows, ids, drafted = _drafted_before(num_rows, draft_token_ids)
        committed = np.array([output.amount(token_id) for token_id in ids.tolist()], np.float32)
        found["output_ids"], found["output_amounts"] = output.ids, output.amounts
        found["output_rows"], found["output_drafted_ids"] = rows, ids
        found["output_drafted_amounts"] = committed + drafted
    if params.bad_words:
        found["banned_rows"], found["banned_ids"] = _banned(
            num_rows, history.bad_words, text_end, draft_token_ids
        )
    if is_short:
        found["held_ids"] = history.held_ids
    if state is not None:
        found["allowed"] = allowed
        if params.bad_words:
            found |= _with_ends(allowed, found["banned_rows"], found["banned_ids"], state.ends)
    return Penalties(**found)


def _masks(state: GrammarState, num_rows: int, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Returns [rows, words]: the masks of rows up to the first drafted token after which the grammar takes too much."""
    masks = [state.allowed()]
    state.begin_draft()
    with suppress(GrammarLimitError):
        for row in range(1, num_rows):
            masks.append(state.allowed(draft_token_ids[:row]))
    return np.stack(masks)


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


def _banned(
    num_rows: int, bad_words: BadWords, text_end: Sequence[int], draft_token_ids: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (row, id) of the last token of a word wherever the text before it ends with the rest of the word."""
    text = (*text_end, *draft_token_ids)
    rows, parts = list[int](), list[NDArray[np.int64]]()
    for row in range(num_rows):
        for ids in bad_words.completing(text, len(text_end) + row):
            rows += [row] * len(ids)
            parts.append(ids)
    return np.array(rows, np.int64), np.concatenate(parts) if parts else _NO_IDS


def _with_ends(
    allowed: NDArray[np.int32], rows: NDArray[np.int64], ids: NDArray[np.int64], ends: NDArray[np.int32]
) -> dict[str, Any]:
    """Returns what is allowed, [rows, words], and banned, (row, id) each. A row that bad words leave nothing of has
    end-of-text alone (`ends`), as a grammar without a token left has; else all of its scores would be -inf, and any
    token would be taken."""
    left = allowed.view(np.uint32).copy()
    is_in = ids >> 5 < left.shape[1]
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_and.at(left, (rows[is_in], ids[is_in] >> 5), ~bits[is_in])
    is_empty = np.asarray(~left.any(axis=1), np.bool_)
    allowed = np.where(is_empty[:, None], ends, allowed)
    return {"allowed": allowed, "banned_rows": rows[~is_empty[rows]], "banned_ids": ids[~is_empty[rows]]}


def left_of(
    state: GrammarState, bad_words: BadWords, text: Sequence[int], path: Sequence[int] = ()
) -> tuple[NDArray[np.int32], bool]:
    """Returns the ids, [words], that a grammar allows after its output and a path, end-of-text alone where bad words
    leave none of them, and whether that is so. `text` ends with the path, and has the longest bad word before it.
    Raises `GrammarLimitError`."""
    allowed = state.allowed(path)
    parts = list(bad_words.completing(text, len(text)))
    if not parts:
        return allowed, False
    banned = np.concatenate(parts)
    found = _with_ends(allowed[None], np.zeros_like(banned), banned, state.ends)
    return found["allowed"][0], not len(found["banned_ids"])


MaskScores = Callable[[Any, Any, Any], None]
"""Does what `mask_scores` does."""


def penalize(
    xp: Any,
    scores: Any,
    params: SamplingParams,
    found: Penalties,
    num_short: int = 0,
    mask: MaskScores = mask_scores,
) -> None:
    """Changes scores [rows, vocab] in place, as docs/design.md §5 has it; `found` are arrays beside them. The first
    `num_short` rows follow an output that is too short to end."""
    if params.repetition_penalty != 1:
        for where in ((slice(None), found.seen_ids), (found.seen_rows, found.seen_drafted_ids)):
            picked = scores[where]  # Keskar et al. 2019
            scores[where] = xp.where(picked < 0, picked * found.repetition, picked / found.repetition)
    if params.presence_penalty or params.frequency_penalty:
        presence, frequency = wire(params.presence_penalty), wire(params.frequency_penalty)  # OpenAI's
        ids, drafted = found.output_ids, (found.output_rows, found.output_drafted_ids)
        untouched = scores[drafted]
        scores[:, ids] = scores[:, ids] - frequency * found.output_amounts - presence
        scores[drafted] = untouched - frequency * found.output_drafted_amounts - presence
    if params.logit_bias:  # each id is listed once
        scores[:, found.bias_ids] = scores[:, found.bias_ids] + found.biases
    if params.bad_words:
        banned = found.banned_rows, found.banned_ids
        scores[banned] = xp.full_like(scores[banned], -math.inf)  # CUDA waits to copy what is no array
    if params.held_back and num_short > 0:
        short = scores[:num_short]
        short[:, found.held_ids] = xp.full_like(short[:, :1], -math.inf)
    if params.grammar is not None:
        mask(xp, scores, found.allowed)
