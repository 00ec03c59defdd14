"""A target whose text is known beforehand, and that takes the time that the pair says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.cloud_verifier.backends.base import ForwardItem, KVSequence, Logits
from outrider.cloud_verifier.kv.blocks import BlockUsage
from outrider.experiments.synthetic.draft import TOKENIZER_FINGERPRINT
from outrider.experiments.synthetic.keyed import VOCAB_SIZE, KeyedTokens, wait_until
from outrider.experiments.synthetic.pair import SyntheticPair

FIRST_ROWS = 64
OTHERS = -1e4  # a logit: no noise and no temperature makes another token the sample


@dataclass(eq=False, slots=True)
class _SyntheticKV:
    length: int = 0
    num_reused: int = 0


class SyntheticBackend:
    """Implements `TargetBackend`: lengths instead of KV, a row with one peak instead of a forward.

    The token at position t is a function of (seed, t), whatever the text before it and the sampling.
    """

    num_tokens = VOCAB_SIZE
    vocab_size = VOCAB_SIZE
    max_context = 1 << 20
    max_tree_nodes = 0  # what it accepts is drawn for chains
    num_kv_tokens = 1 << 30
    dtype = "float32"
    kv_dtype = "float32"
    device = "cpu"
    is_reproducible = True
    quantisation = ""
    num_weight_bytes = num_kv_bytes = 0
    staging = None
    model_id = "synthetic"
    tokenizer_fingerprint = TOKENIZER_FINGERPRINT
    eos_token_ids: tuple[int, ...] = (0,)  # which it never writes

    def __init__(self, pair: SyntheticPair | None = None) -> None:
        self.pair = pair or SyntheticPair()
        self.fingerprint = hashlib.sha256(f"synthetic target {self.pair.seed}".encode()).hexdigest()
        self.num_forwards = 0
        self.num_query_rows = 0
        self._tokens = KeyedTokens(self.pair.seed)
        self._rows = _blank(FIRST_ROWS)
        self._peaks = np.zeros(0, np.int64)  # of the last forward's rows

    @property
    def num_free_tokens(self) -> int:
        """Returns the tokens that the pool has room for: no limit."""
        return self.num_kv_tokens

    @property
    def kv_usage(self) -> BlockUsage:
        """Returns a pool of empty blocks."""
        empty = self.num_kv_tokens
        return BlockUsage(block_size=1, num_used=0, num_cached=0, num_empty=empty, num_evicted=0)

    def new_sequence(self, tenant: str = "", token_ids: Sequence[int] = ()) -> _SyntheticKV:
        """Returns an empty sequence."""
        return _SyntheticKV()

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Does nothing: nothing is worth finding again."""

    def forward(self, items: Sequence[ForwardItem]) -> Logits:
        """Returns one-hot logits of the text, after the time that a forward takes."""
        start_s = time.perf_counter()
        num_tokens, peaks = 0, []
        for item in items:
            kv = item.sequence
            assert isinstance(kv, _SyntheticKV)
            kv.length += len(item.token_ids)
            num_tokens += len(item.token_ids)
            peaks.append(self._tokens.between(kv.length - item.num_logit_rows + 1, kv.length + 1))
        self.num_forwards += 1
        self.num_query_rows += num_tokens
        logits = self._peaked(np.concatenate(peaks))
        wait_until(start_s + self.pair.target_s + (num_tokens - 1) * self.pair.verify_token_s)
        return logits

    def _peaked(self, peaks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Logits:
        """Returns a view [len(peaks), vocab] of the one array, the last forward's peaks taken back."""
        if len(peaks) > len(self._rows):
            self._rows, self._peaks = _blank(2 * len(peaks)), self._peaks[:0]
        self._rows[np.arange(len(self._peaks)), self._peaks] = OTHERS
        self._rows[np.arange(len(peaks)), peaks] = 0.0
        self._peaks = peaks
        return self._rows[: len(peaks)]

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drops what is past `length`."""
        assert isinstance(sequence, _SyntheticKV)
        sequence.length = length

    def keep(self, sequence: KVSequence, start: int, nodes: Sequence[int]) -> None:
        """Raises `NotImplementedError`."""
        raise NotImplementedError("a synthetic target takes no trees")

    def close(self, sequence: KVSequence, *, is_wrong: bool = False) -> None:
        """Does nothing: lengths need no freeing."""

    def check_integrity(self) -> None:
        """Does nothing: there is no bookkeeping."""


def _blank(num_rows: int) -> Logits:
    return np.full((num_rows, VOCAB_SIZE), OTHERS, np.float32)
