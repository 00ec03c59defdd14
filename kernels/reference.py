"""The kernels in plain numpy and float64: their specification, and what runs where nothing is compiled.

A row is float32 logits [vocab]; its scores are logits / temperature in float32. A `threshold` on the scores'
scale (-inf: none) keeps scores >= threshold (`outrider.common.sampling.truncation`). `key` is the uint64
[seed, purpose, position, index] of the noise (`outrider.common.noise.draws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Key = NDArray[np.uint64]


def noise(key: Key, num_tokens: int) -> NDArray[np.float64]:
    """Returns the Gumbel noise of token ids 0 ... num_tokens-1: float64 [num_tokens]."""
    counter = np.array([0, key[2], key[3], 0], np.uint64)
    words = np.random.Philox(key=key[:2], counter=counter).random_raw((num_tokens + 1) // 2)
    lanes = words.astype("<u8", copy=False).view("<u4")[:num_tokens]
    return np.asarray(-np.log(-np.log1p((lanes + 0.5) * -(2.0**-32))))


def scores_of(row: Row, temperature: float, threshold: float) -> Row:
    """Returns the scores [vocab], -inf below the threshold."""
    scores = row / np.float32(temperature)
    return scores if threshold == -math.inf else np.where(scores >= threshold, scores, np.float32(-math.inf))


def mask_scores(scores: Row, words: NDArray[np.int32]) -> None:
    """Sets to -inf, in place, the scores [rows, vocab] whose bit in `words` [rows, ceil(num_tokens / 32)] is not set,
    low bit first, and those of ids that have none."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    allowed = np.zeros(scores.shape, np.bool_)
    num_ids = min(scores.shape[1], bits.shape[1])
    allowed[:, :num_ids] = bits[:, :num_ids] != 0
    scores[~allowed] = -math.inf


def logsumexp(row: Row, temperature: float, threshold: float) -> tuple[float, float]:
    """Returns (top, log_sum): the largest logit, and log sum exp((logit - top) / temperature) of those kept.

    So log p of a kept id is (logit - top) / temperature - log_sum. (NaN, NaN) where the row has NaN; log_sum
    is -inf where every logit is, and NaN where one is +inf.
    """
    top = float(row.max())
    if not math.isfinite(top):
        return top, -math.inf if top == -math.inf else math.nan
    is_kept = scores_of(row, temperature, threshold) > -math.inf
    return top, math.log(np.exp((row[is_kept].astype(np.float64) - top) / temperature).sum())


def gumbel_argmax(row: Row, temperature: float, threshold: float, key: Key) -> tuple[int, float, float]:
    """Returns (token_id, top, log_sum): the argmax of score + noise, then what `logsumexp` returns.

    Equal sums go to the lowest id; with +inf among the scores it is the first of those, in a row of -inf
    alone id 0, in a row with NaN -1.
    """
    top, log_sum = logsumexp(row, temperature, threshold)
    if math.isnan(top):
        return -1, top, log_sum
    sums = scores_of(row, temperature, threshold).astype(np.float64) + noise(key, row.size)
    return int(sums.argmax()), top, log_sum


def sample(
    row: Row,
    temperature: float,
    threshold: float,
    key: Key,
    top: float,
    log_sum: float,
    changed_ids: NDArray[np.int64],
    changed_weights: NDArray[np.float64],
) -> int:
    """Returns the argmax of w + noise, where w is `changed_weights` at `changed_ids` and log p elsewhere.

    Equal sums go to the lowest id; -1 where every w is -inf. The row must be finite at its `top`.
    """
    weights = (row.astype(np.float64) - top) / temperature - log_sum
    weights[scores_of(row, temperature, threshold) == -math.inf] = -math.inf
    weights[changed_ids] = changed_weights
    if weights.max() == -math.inf:
        return -1
    return int((weights + noise(key, row.size)).argmax())


def entropy(row: Row, temperature: float, threshold: float, top: float, log_sum: float) -> float:
    """Returns H(p) in nats."""
    is_kept = scores_of(row, temperature, threshold) > -math.inf
    logs = (row[is_kept].astype(np.float64) - top) / temperature - log_sum
    return float(-(np.exp(logs) * logs).sum())


def truncation_threshold(row: Row, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """Returns the lowest score that top-k, top-p and min-p keep (`outrider.common.sampling.truncation`).

    It is -inf where nothing is cut, or the largest logit is not finite.
    """
    descending = np.sort(scores_of(row, temperature, -math.inf).astype(np.float64))[::-1]
    threshold = -math.inf
    if not math.isfinite(descending[0]):
        return threshold
    if 0 < top_k < row.size:
        threshold = float(descending[top_k - 1])
        descending = descending[descending >= threshold]
    if top_p < 1:
        weights = np.exp(descending - descending[0])
        is_kept = weights.cumsum() - weights < top_p * weights.sum()
        threshold = float(descending[np.count_nonzero(is_kept) - 1])
    if min_p > 0:
        threshold = max(threshold, float(descending[0]) + math.log(min_p))
    return threshold


def gumbel_argmax_draft(
    rows: NDArray[np.float32],
    num_tokens: int,
    first: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    drafted: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Returns float64 [n, 4], (token_id, top, log_sum, threshold) of the rows from `first` on, up to the
    first whose token differs from the one drafted there: `gumbel_argmax` at each row's
    `truncation_threshold`.

    `rows` is [num_rows, at least num_tokens], ids from `num_tokens` on do not exist; `position` is row 0's.
    The noise is that of target samples, purpose 0. At temperature 0 a token is the first argmax, and log_sum
    0.
    """
    found = []
    for index in range(first, len(rows)):
        row = rows[index, :num_tokens]
        if temperature == 0:
            top = float(row.max())
            found.append((-1 if math.isnan(top) else int(row.argmax()), top, 0.0, -math.inf))
        else:
            threshold = truncation_threshold(row, temperature, top_k, top_p, min_p)
            key = np.array([seed, 0, position + index, 0], np.uint64)
            found.append((*gumbel_argmax(row, temperature, float(np.float32(threshold)), key), threshold))
        if index >= drafted.size or found[-1][0] != drafted[index]:
            break
    return np.array(found, np.float64)


def paged_attention(
    query: NDArray[np.floating],
    key_pool: NDArray[np.floating],
    value_pool: NDArray[np.floating],
    seen: Sequence[Sequence[int]],
    scaling: float,
    softcap: float | None = None,
) -> NDArray[np.float64]:
    """Returns the attention [num_rows, heads, head_dim] of queries [heads, num_rows, head_dim].

    A slot is a token's place in a pool [num_blocks, block_size, kv_heads, head_dim]; row i sees the tokens in slots
    `seen[i]`. Query heads share KV heads in order: with 6 and 2, heads 0 to 2 have KV head 0. With a `softcap` c a
    score s counts as c · tanh(s / c).
    """
    num_heads, num_rows, head_dim = query.shape
    num_groups = num_heads // key_pool.shape[2]
    out = np.empty((num_rows, num_heads, head_dim))
    for row, slots in enumerate(seen):
        keys, values = (  # [tokens, heads, head_dim]
            pool.reshape(-1, *pool.shape[2:])[list(slots)].astype(np.float64).repeat(num_groups, axis=1)
            for pool in (key_pool, value_pool)
        )
        scores = np.einsum("hd,thd->ht", query[:, row].astype(np.float64), keys) * scaling
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return out


def draft_signals(logits: Row, token_id: int) -> tuple[float, float, float]:
    """Returns (entropy in bits, nll of `token_id` in nats, margin: the largest minus the second probability)."""
    wide = logits.astype(np.float64)
    logs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    second, first = np.sort(np.exp(logs))[-2:]
    return float(-(np.exp(logs) * logs).sum() / math.log(2)), float(-logs[token_id]), float(first - second)


def linear(
    x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Returns x Wᵀ + b, float64 [rows, out], for x [rows, in], a weight [out, in] and a bias [out]."""
    return x.astype(np.float64) @ weight.astype(np.float64).T + bias
