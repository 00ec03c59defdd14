"""Drafting without a model: what followed the last tokens where they last occurred in the text is proposed.

Saxena 2023, "Prompt Lookup Decoding". The longest run of tokens wins, the most recent of equally long ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.common.errors import InvalidFieldError, ModelError, UsageError
from outrider.common.models.fingerprint import num_tokens, tokenizer_fingerprint
from outrider.common.sampling.support import certain
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.drafting.base import ShouldStop, ended
from outrider.edge_client.drafting.export.hf_config import read_eos_token_ids
from outrider.edge_client.drafting.registry import DEFAULT_MAX_NGRAM
from outrider.edge_client.drafting.spec import SPEC_FILE, TOKENIZER_FILE


class NgramIndex:
    """A text, and for each of its positions where the run of 1 … `max_ngram` tokens ending there occurred
    before. Adding and dropping a token cost `max_ngram` dictionary accesses; looking one up costs none.
    """

    def __init__(self, max_ngram: int) -> None:
        self.text: list[int] = []
        # One of each for n = 1 … max_ngram; ends are exclusive, 0 is nowhere. `_latest`: n tokens → where
        # they end for the last time. `_earlier`, by i: where the n tokens that end with token i ended before.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._earlier = [array("q") for _ in range(max_ngram)]

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.text.append(token_id)
            end = len(self.text)
            for n, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
                if n > end:
                    earlier.append(0)
                    continue
                ngram = tuple(self.text[end - n :])
                earlier.append(latest.get(ngram, 0))
                latest[ngram] = end

    def truncate(self, position: int) -> None:
        while len(self.text) > position:
            end = len(self.text)
            for n, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
                before = earlier.pop()
                if before:
                    latest[tuple(self.text[end - n :])] = before
                elif n <= end:
                    del latest[tuple(self.text[end - n :])]
            self.text.pop()

    def match(self) -> int:
        """Where the most recent earlier occurrence of the longest repeated run at the end of the text ends;
        0 for none."""
        return next((earlier[-1] for earlier in reversed(self._earlier) if earlier and earlier[-1]), 0)

    def check_integrity(self) -> None:
        fresh = NgramIndex(len(self._latest))
        fresh.extend(self.text)
        assert (fresh._latest, fresh._earlier) == (self._latest, self._earlier), "the index is not the text's"


class PromptLookupSequence:
    """A `DraftSequence` that copies. Without a match it proposes nothing, and the target goes on alone."""

    def __init__(self, num_tokens: int, max_ngram: int, has_supports: bool = False) -> None:
        self._num_tokens = num_tokens
        self._has_supports = has_supports
        self._index = NgramIndex(max_ngram)

    @property
    def position(self) -> int:
        return len(self._index.text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """See `DraftSequence.commit`."""
        for token_id in token_ids:
            if not 0 <= token_id < self._num_tokens:
                raise InvalidFieldError(
                    "token_ids", f"{token_id} is not below the tokenizer's {self._num_tokens} tokens"
                )
        self._index.extend(token_ids)

    def truncate(self, position: int) -> None:
        """See `DraftSequence.truncate`."""
        assert 0 <= position <= self.position, f"cannot truncate {self.position} tokens to {position}"
        self._index.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """See `DraftSequence.propose`. A copy that reaches the end of the text goes on with itself, so a
        repetition is proposed as often as it fits. Each probability is 1: the draft had no other choice."""
        assert self._index.text, "a draft needs at least one committed token"
        start = self._index.match()
        if not start or num_draft_tokens <= 0:
            return Draft((), ())
        copied = self._index.text[start : start + num_draft_tokens]
        period = len(copied)
        token_ids = tuple(copied[i % period] for i in range(num_draft_tokens))
        supports = tuple(map(certain, token_ids)) if self._has_supports else ()
        return ended(Draft(token_ids, (1.0,) * num_draft_tokens, supports=supports), should_stop)

    def close(self) -> None:
        self._index = NgramIndex(0)

    def check_integrity(self) -> None:
        self._index.check_integrity()


class PromptLookupModel:
    """A `DraftModel` without weights, for texts of any length."""

    max_context = sys.maxsize
    signal_names = ()

    def __init__(
        self,
        num_tokens: int,
        tokenizer_fingerprint: str,
        eos_token_ids: tuple[int, ...] = (),
        max_ngram: int = DEFAULT_MAX_NGRAM,
    ) -> None:
        self.num_tokens = num_tokens
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.eos_token_ids = eos_token_ids
        self._max_ngram = max_ngram

    @classmethod
    def open(cls, directory: Path, *, max_ngram: int = DEFAULT_MAX_NGRAM) -> Self:
        """From any directory with a tokenizer.json. Raises `ModelError` without one.

        A draft.json or the target's own configuration beside it tells the end-of-text ids, which matter only
        to what is kept unverified.
        """
        if max_ngram < 1:
            raise UsageError(f"prompt lookup compares at least one token, not {max_ngram}")
        tokenizer = directory / TOKENIZER_FILE
        return cls(
            num_tokens(tokenizer), tokenizer_fingerprint(tokenizer), _eos_token_ids(directory), max_ngram
        )

    @property
    def fingerprint(self) -> str:
        content = f"prompt-lookup {self._max_ngram} {self.tokenizer_fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> PromptLookupSequence:
        """See `DraftModel.sequence`. A copy is a copy whatever the sampling parameters."""
        return PromptLookupSequence(self.num_tokens, self._max_ngram, has_supports=num_support > 0)

    def close(self) -> None:
        """There is nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    spec = directory / SPEC_FILE
    if not spec.exists():
        return read_eos_token_ids(directory)
    try:
        return tuple(int(token_id) for token_id in json.loads(spec.read_text("utf-8"))["eos_token_ids"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{spec} cannot be read: {error}") from error
