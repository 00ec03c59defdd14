"""A low-rank head over the draft's last hidden state, trained while it drafts: `--learn DIR`.

Online Speculative Decoding (2310.07177) distils the draft further on what users ask. Here only a head is learned: row
logits += B·f with f = (A·h/|h|, a constant), A a fixed random projection [rank, hidden_size], B [num_tokens, rank + 1]
from zero. A step on the cross-entropy to the target's most probable ids is B[ids] -= η (q - p) fᵀ.

Only ids within `CANDIDATE_NATS` of the draft's likeliest change, so neither cost grows with the vocabulary but for one
comparison and one rescaling of a row. Before each step both, the draft and the draft with the head, are judged by their
overlap with the target at that token; the head drafts while it was better lately.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.common.types import TokenIds, TokenLogprobs
from outrider.edge_client.drafting.rows.kv_sequence import NUM_BEFORE
from outrider.edge_client.drafting.rows.rows import Rows

NUM_TOP = 8  # of the target's log-probabilities a token; with 20 acceptance is the same to .001
CANDIDATE_NATS = 5.0  # ids that are less likely than e^-5 of the likeliest do not change
_MAX_SEEN = 4096  # rows kept for a verdict, of all sessions; some 1 KB each
_MOST_CHANGE = 20.0  # of a logit
_LEAST_SUM = 0.1  # of weights that are divided by it: rounding then takes a few millionths
_LEAST_STEP = 2e-3  # of a probability; smaller errors are left
_CONSTANT = 0.3  # the last feature: what an id gains or loses whatever the state
_SEED = 2310_07177

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Holds what was chosen on some drafts and prompts, of ranks 16 to 192, rates .5 and 1, windows 200 and 400 and
    margins .002 and .004, and is judged on others by `make bench-sources`."""

    rank: int = 32
    rate: float = 1.0
    window: int = 200  # tokens over which the overlaps are averaged, exponentially
    margin: float = 0.004  # of overlap by which the head must have been better to draft


@dataclass(frozen=True, slots=True)
class _Seen:
    """Holds a row before its verdict: of the candidates, rising ids and their probabilities."""

    ids: NDArray[np.int64]
    probs: Floats  # by the draft alone
    adapted: Floats  # with the head as it was then
    total: float  # of `probs`
    features: Floats


@dataclass(slots=True)
class LearnedCounts:
    """Counts what was learned from, over the lifetime of a head."""

    num_tokens: int = 0
    num_drafting: int = 0  # tokens judged while the head drafted
    base_overlap: float = 0.0  # sums over tokens
    head_overlap: float = 0.0
    drafted_overlap: float = 0.0  # of whichever drafted


@dataclass(slots=True)
class LearnedHead:
    """Adapts rows, and learns from verdicts. Thread-safe; sessions of one draft and one target share it."""

    num_tokens: int
    hidden_size: int
    settings: HeadSettings = field(default_factory=HeadSettings)
    table: Floats = field(init=False)  # B, [num_tokens, rank + 1]
    counts: LearnedCounts = field(default_factory=LearnedCounts)
    gain: float = 0.0  # overlap of the head less the draft's, lately
    _projection: Floats = field(init=False)  # A, [hidden_size, rank]
    _seen: OrderedDict[tuple[int, TokenIds], _Seen] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        rank = min(self.settings.rank, self.hidden_size)
        self.table = np.zeros((self.num_tokens, rank + 1), np.float32)
        random = np.random.default_rng(_SEED).standard_normal((self.hidden_size, rank))
        basis, _ = np.linalg.qr(random)
        self._projection = (basis * np.sqrt(self.hidden_size / rank)).astype(np.float32)

    @property
    def is_drafting(self) -> bool:
        """Returns whether the head was better than the draft alone lately, and changes rows."""
        return self.gain > self.settings.margin

    def adapt(self, rows: Rows, index: int, temperature: float, position: int, before: Sequence[int]) -> None:
        """Keeps row `index` for the verdict on the token at `position`, and changes it in place where the head drafts.

        `before` are the tokens before that position, or the last `NUM_BEFORE` of them; `temperature` is that of the
        tempered row.
        """
        assert rows.hidden is not None, "the draft's graph returns no states"
        logits, probs = rows.logits[index], rows.probs[index]
        ids = (logits > logits.max() - CANDIDATE_NATS).nonzero()[0]
        features = self._features(rows.hidden[index])
        change = (self.table.take(ids, axis=0) @ features).clip(-_MOST_CHANGE, _MOST_CHANGE)
        known = probs.take(ids)
        adapted = known * np.exp(change)
        total = float(known.sum())
        adapted *= np.float32(1.0 / (max(0.0, 1.0 - total) + float(adapted.sum())))
        with self._lock:
            self._seen[key_of(position, before)] = _Seen(ids, known, adapted, total, features)
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
        if not self.is_drafting:
            return
        _add(logits, probs, ids, change)
        if rows.tempered_logits is not rows.logits:
            change *= np.float32(1.0 / (temperature or 1.0))
            _add(rows.tempered_logits[index], rows.tempered_probs[index], ids, change)

    def learn(self, position: int, before: Sequence[int], target: TokenLogprobs) -> None:
        """Judges the draft and the head on the target's token at `position`, then takes one step. Does nothing where
        the draft has computed no row there."""
        with self._lock:
            seen = self._seen.pop(key_of(position, before), None)
            if seen is None or not target.top_token_ids:
                return
            places, told, left = _told(seen, target)
            if not len(places):
                return
            known, adapted = seen.probs[places], seen.adapted[places]
            self._judge(told, known, adapted)
            rest = seen.total - float(
                known.sum()
            )  # of the ids that the target did not tell: they keep their shares
            step = seen.adapted - seen.probs * np.float32(left / rest if rest > 0 else 0.0)
            step[places] = adapted - told
            moved = (np.abs(step) > _LEAST_STEP).nonzero()[0]
            step = step[moved] * np.float32(self.settings.rate)
            self.table[seen.ids[moved]] -= step[:, None] * seen.features

    def _features(self, hidden: Floats) -> Floats:
        size = float(np.sqrt(hidden @ hidden)) or 1.0
        features = np.empty(self.table.shape[1], np.float32)
        features[:-1] = (hidden @ self._projection) / size
        features[-1] = _CONSTANT
        return features

    def _judge(self, target: Floats, base: Floats, adapted: Floats) -> None:
        """Compares the overlaps on the target's most probable ids, by a head that has not learned from them yet."""
        base_overlap = float(np.minimum(target, base).sum())
        head_overlap = float(np.minimum(target, adapted).sum())
        counts, is_drafting = self.counts, self.is_drafting
        counts.num_tokens += 1
        counts.num_drafting += is_drafting
        counts.base_overlap += base_overlap
        counts.head_overlap += head_overlap
        counts.drafted_overlap += head_overlap if is_drafting else base_overlap
        self.gain += (head_overlap - base_overlap - self.gain) / self.settings.window


def key_of(position: int, before: Sequence[int]) -> tuple[int, TokenIds]:
    """Returns what a row and the verdict on it have in common."""
    return position, tuple(before[-NUM_BEFORE:])


def _told(seen: _Seen, target: TokenLogprobs) -> tuple[NDArray[np.int64], Floats, float]:
    """Returns the places among the candidates of the ids that the target told, their probabilities by it, and what it
    leaves for the other candidates."""
    top_ids = np.array(target.top_token_ids)
    logprobs = np.array(target.top_logprobs, np.float32)
    told = np.exp(np.minimum(logprobs, 0.0))  # a verifier may tell more than a probability
    left = max(0.0, seen.total - float(told.sum()))
    places = seen.ids.searchsorted(top_ids)
    is_there = seen.ids.take(places, mode="clip") == top_ids
    return places[is_there], told[is_there], left


def _add(logits: Floats, probs: Floats, ids: NDArray[np.int64], change: Floats) -> None:
    """Adds `change` to the logits of `ids`, and makes `probs` their softmax: by the ids alone, unless too little is
    left of what was likely before, as at low temperatures."""
    logits[ids] += change
    if float(change.max(initial=0.0)) <= _MOST_CHANGE:
        known = probs.take(ids)
        new = known * np.exp(change)
        total = max(0.0, 1.0 - float(known.sum())) + float(new.sum())
        if total >= _LEAST_SUM:
            scale = np.float32(1.0 / total)
            probs *= scale
            probs[ids] = np.minimum(new * scale, 1.0)
            return
    np.exp(logits - logits.max(), out=probs)
    probs /= probs.sum()
