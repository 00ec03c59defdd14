"""Keeps the learned head of one draft for each target that it met: loads, saves and judges with the right one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.common.types import TokenIds, TokenLogprobs
from outrider.edge_client.drafting.learned.files import check_directory, head_path, load_head, save_head
from outrider.edge_client.drafting.learned.head import LearnedHead
from outrider.edge_client.drafting.rows.kv_sequence import NUM_BEFORE
from outrider.edge_client.drafting.rows.rows import Rows

_FIXED_BYTES = 2 + 2 * 5 + 2 * 2  # of a token's entry: its header, two float fields, the headers of two lists
_SAVE_EVERY = 500  # learned tokens; a save takes some milliseconds

log = logging.getLogger("outrider")


class Learner:
    """Drafts and learns with the head of the target that was met last. Thread-safe."""

    def __init__(self, directory: Path, draft_fingerprint: str, num_tokens: int, hidden_size: int) -> None:
        """Raises `UsageError` where the directory cannot be made."""
        check_directory(directory)
        self.directory = directory
        self.head: LearnedHead | None = None
        self._draft_fingerprint = draft_fingerprint
        self._shape = num_tokens, hidden_size
        self._target_fingerprint = ""
        # Learned tokens at the last save, and at the last that was tried.
        self._num_saved = self._num_tried = 0
        self._is_failing = False
        self._lock = threading.Lock()

    def meet(self, target_fingerprint: str) -> None:
        """Takes the head of a target, from its file where there is one. Raises `ModelError` for a file that is damaged
        or was learned with another draft or target."""
        with self._lock:
            if target_fingerprint == self._target_fingerprint:
                return
            self._save(is_last=True)
            head = LearnedHead(*self._shape)
            path = head_path(self.directory, self._draft_fingerprint, target_fingerprint)
            if path.is_file():
                load_head(path, head, self._draft_fingerprint, target_fingerprint)
            self.head, self._target_fingerprint = head, target_fingerprint
            self._num_saved = self._num_tried = head.counts.num_tokens

    def adapt(self, rows: Rows, index: int, temperature: float, position: int, before: Sequence[int]) -> None:
        """See `LearnedHead.adapt`; without a target nothing changes."""
        if (head := self.head) is not None:
            head.adapt(rows, index, temperature, position, before)

    def learn(self, text: Sequence[int], start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Learns from the target's log-probabilities of the tokens of `text` from position `start` on."""
        if (head := self.head) is not None:
            for position, entry in enumerate(logprobs, start):
                before: TokenIds = tuple(text[max(0, position - NUM_BEFORE) : position])
                head.learn(position, before, entry)

    def ended(self) -> None:
        """Saves where enough was learned since the last time; a session has ended. A head that cannot be saved is
        logged, once until one can be."""
        with self._lock:
            if self.head is not None and self.head.counts.num_tokens >= self._num_tried + _SAVE_EVERY:
                self._save()

    def close(self) -> None:
        """Saves what was learned; logs where it cannot be."""
        with self._lock:
            self._save(is_last=True)

    def _save(self, is_last: bool = False) -> None:
        head = self.head
        if head is None or head.counts.num_tokens == self._num_saved:
            return
        path = head_path(self.directory, self._draft_fingerprint, self._target_fingerprint)
        self._num_tried = head.counts.num_tokens
        try:
            save_head(path, head, self._draft_fingerprint, self._target_fingerprint)
        except UsageError as error:
            if is_last or not self._is_failing:
                log.warning("%s; learning goes on without", error)
            self._is_failing = True
            return
        self._num_saved, self._is_failing = self._num_tried, False


def num_bytes(logprobs: Sequence[TokenLogprobs]) -> int:
    """Returns what log-probabilities take in a message (docs/protocol.md), where no float of theirs is 0."""
    ids = [token_id for entry in logprobs for token_id in entry.top_token_ids]
    return _FIXED_BYTES * len(logprobs) + sum(4 + (max(1, each.bit_length()) + 6) // 7 for each in ids)
