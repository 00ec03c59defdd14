"""The processing of logits into scores: one implementation for both sides (docs/design.md §5).

Order: repetition penalty (prompt and output), presence and frequency penalties (output) -> logit bias, bad words
and grammar -> temperature -> top-k -> top-p -> min-p. The penalties of row i see the draft tokens before it.
Written once against the array namespace passed in, numpy or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import InvalidFieldError, ModelError
from outrider.common.grammar.masks import mask_scores
from outrider.common.noise.draws import coupled_argmax
from outrider.common.sampling.history import History
from outrider.common.sampling.penalties import MaskScores, Penalties, find_penalties, penalize, wire
from outrider.common.sampling.truncation import copy, native, truncate
from outrider.common.types import SamplingParams

_MIN_TEMPERATURE = 1e-3  # below it float32 scores lose the noise; 0 is greedy
_MAX_BIAS = 1e4


def mask_end_of_text(scores: Any, eos_token_ids: Iterable[int], num_rows: int) -> None:
    """Masks the end-of-text ids in the first `num_rows` rows: the sequence is too short to end there."""
    for token_id in eos_token_ids:
        scores[:num_rows, token_id] = -math.inf


_RANGES = {
    "top_k": (0, 2**32 - 1, "0 (off) or more"),
    "top_p": (1e-6, 1, "from 0.000001 to 1 (off)"),
    "min_p": (0, 1 - 2**-24, "0 (off) or more, and below 1"),  # the largest float32 below 1
    "repetition_penalty": (0.01, 100, "from 0.01 to 100; 1 is off"),
    "presence_penalty": (-100, 100, "from -100 to 100"),
    "frequency_penalty": (-100, 100, "from -100 to 100"),
    "min_new_tokens": (0, 2**32 - 1, "0 or more"),
    "seed": (0, 2**64 - 1, "from 0 to 2^64 - 1"),
}


def check_sampling_params(params: SamplingParams, num_tokens: int) -> None:
    """Raises InvalidFieldError naming the wire field of the first value out of range.

    Numbers are checked as they are after the wire, so that both sides take and refuse the same ones.
    `num_tokens` is the tokenizer's size: ids in `logit_bias` and `bad_words` must be below it.
    """
    expected = f"0 (greedy) or from {_MIN_TEMPERATURE} to 1000"
    is_valid = wire(params.temperature) == 0 or _is_within(params.temperature, _MIN_TEMPERATURE, 1000)
    _require(is_valid, "temperature", params.temperature, expected)
    for name, (low, high, expected) in _RANGES.items():
        value = getattr(params, name)
        _require(_is_within(value, low, high), name, value, expected)
    _check_ids(params, num_tokens)
    if params.grammar is not None:
        why = "0 with a grammar, which says itself where a text may end"
        _require(params.min_new_tokens == 0, "min_new_tokens", params.min_new_tokens, why)


def _is_within(value: float, low: float, high: float) -> bool:
    if isinstance(value, int):
        return low <= value <= high
    return wire(low) <= wire(value) <= wire(high)


def _check_ids(params: SamplingParams, num_tokens: int) -> None:
    """Checks lists that may be long: messages are made for what is wrong alone."""
    seen: set[int] = set()
    for token_id, bias in params.logit_bias:
        is_valid = 0 <= token_id < num_tokens and token_id not in seen
        if not (is_valid and -_MAX_BIAS <= wire(bias) <= _MAX_BIAS):
            _require(0 <= token_id < num_tokens, "logit_bias", token_id, f"a token id below {num_tokens}")
            _require(token_id not in seen, "logit_bias", token_id, "given once")
            _require(False, "logit_bias", bias, f"from {-_MAX_BIAS:g} to {_MAX_BIAS:g}")
        seen.add(token_id)
    for word in params.bad_words:
        if not word or not 0 <= min(word) <= max(word) < num_tokens:
            _require(len(word) > 0, "bad_words", word, "at least one token long")
            wrong = next(token_id for token_id in word if not 0 <= token_id < num_tokens)
            _require(False, "bad_words", wrong, f"token ids below {num_tokens}")
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    _require(len(banned) < num_tokens, "bad_words", len(banned), "fewer than all tokens")


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidFieldError(f"sampling.{name}", f"is {value}; it must be {expected}")


def is_plain(params: SamplingParams) -> bool:
    """Returns whether the scores depend on the last forward alone: no penalty, bad word, minimum length or
    grammar."""
    return (
        params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and not params.bad_words
        and params.min_new_tokens == 0
        and params.grammar is None
    )


def process_logits(
    xp: Any,
    logits: Any,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    draft_token_ids: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    num_tokens: int | None = None,
) -> Any:
    """Returns scores [rows, vocab], masked entries -inf; `logits` (float32 [rows, vocab]) stay unchanged.

    `xp` is the module `numpy` or `torch`, and logits an array of it. Row i follows `prompt_ids + output_ids +
    draft_token_ids[:i]`. Ids at or above `num_tokens` (default: none) do not exist and are masked. At
    temperature 0 the scores are for an argmax: neither scaled nor truncated. The result may be `logits`
    itself where there is nothing to do.
    """
    scores = apply_penalties(
        xp,
        logits,
        params,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        draft_token_ids=draft_token_ids,
        eos_token_ids=eos_token_ids,
        num_tokens=num_tokens,
    )
    return shape(xp, scores, params)


def apply_penalties(
    xp: Any,
    logits: Any,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    draft_token_ids: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    num_tokens: int | None = None,
    found: Penalties | None = None,
    mask: MaskScores = mask_scores,
) -> Any:
    """Applies the first half of `process_logits`: penalties, biases, bad words, grammar.

    Returns scores [rows, vocab]. `found` is what `penalties_of` returns, in arrays of `xp`, where that was called.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows <= len(draft_token_ids) + 1, f"{num_rows} rows for {len(draft_token_ids)} draft tokens"
    is_padded = num_tokens is not None and num_tokens < vocab_size
    scores = logits
    if is_padded or params.logit_bias or not is_plain(params):
        scores = copy(xp, logits)
        if found is None:
            arrays = penalties_of(params, num_rows, prompt_ids, output_ids, draft_token_ids)
            found = Penalties(*(native(xp, each, scores) for each in arrays))
        num_short = params.min_new_tokens - len(output_ids)
        penalize(xp, scores, params, found, num_short, mask)
        if num_short > 0:
            mask_end_of_text(scores, eos_token_ids, num_short)
        if is_padded:
            scores[:, num_tokens:] = -math.inf
    return scores


def penalties_of(
    params: SamplingParams,
    num_rows: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    draft_token_ids: Sequence[int],
    history: History | None = None,
) -> Penalties:
    """Returns what changes the rows after `prompt_ids + output_ids`, whose history is given where it was kept."""
    history = history or History(params, prompt_ids, output_ids)
    longest = history.bad_words.longest
    text_end = (*prompt_ids[-longest:], *output_ids[-longest:]) if longest else ()
    is_short = params.min_new_tokens > len(output_ids)
    return find_penalties(params, num_rows, history, text_end, draft_token_ids, is_short)


def shape(xp: Any, scores: Any, params: SamplingParams) -> Any:
    """Applies the second half to some rows: temperature and truncation.

    Rows that are not read can be left out.
    """
    if params.temperature == 0:
        return scores
    if params.temperature != 1:
        scores = scores / wire(params.temperature)
    return truncate(xp, scores, params.top_k, wire(params.top_p), wire(params.min_p))


def on_wire(params: SamplingParams) -> SamplingParams:
    """Returns the parameters as the other side has them: a temperature of 1e-46 is 0 there, and greedy."""
    floats = [each.name for each in fields(params) if each.type == "float"]
    changes: dict[str, Any] = {name: wire(getattr(params, name)) for name in floats}
    biases = tuple((token_id, wire(bias)) for token_id, bias in params.logit_bias)
    return replace(params, logit_bias=biases, **changes)


def choose(
    scores: NDArray[np.floating[Any]], params: SamplingParams, positions: Sequence[int]
) -> NDArray[np.int64]:
    """Returns the target's token for each row: int64 [rows].

    `scores` is float [rows, vocab] from `process_logits`; `positions[i]` is the length of the sequence before
    the token of row i. Greedy at temperature 0 (ties to the lowest id), else `coupled_argmax`. Raises
    ModelError where the logits are NaN.
    """
    if params.temperature == 0:
        picks = np.asarray(scores.argmax(axis=1), np.int64)
        if np.isnan(scores[np.arange(len(picks)), picks]).any():
            raise ModelError("the model's logits are not numbers (NaN)")
        return picks
    return coupled_argmax(scores, params.seed, positions)
