"""A draft whose rows are the target's own, so that what ends its drafts is not its taste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from support.fakes import FakeBackend

from outrider.common.types import Grammar, SamplingParams, TokenIds
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import RowsSequence


class KnowingDraft:
    """Implements `DraftModel` by the logits of `FakeBackend`. `grammar`, where it is given, takes the place of the
    session's: the same one, with other bounds."""

    fingerprint = tokenizer_fingerprint = ""
    signal_names = ()

    def __init__(self, grammar: Grammar | None = None, max_context: int = 1000) -> None:
        self.backend, self._grammar, self.max_context = FakeBackend(), grammar, max_context
        self.num_tokens, self.eos_token_ids = self.backend.num_tokens, (0,)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> KnowingSequence:
        sampling = replace(sampling, grammar=self._grammar or sampling.grammar)
        sampler = DraftSampler(sampling, self.eos_token_ids, num_support)
        return KnowingSequence(self, sampler, sampling.temperature, num_prompt_tokens)

    def close(self) -> None: ...


class KnowingSequence(RowsSequence):
    def __init__(
        self, model: KnowingDraft, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(sampler, model.num_tokens, model.max_context, num_prompt_tokens)
        self._backend, self._num_tokens, self._temperature = model.backend, model.num_tokens, temperature

    def feed_root(self) -> Rows:
        return self._rows(())

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        return ((self._rows(path), 1) for path in paths)

    def _begin(self) -> Rows:
        return self._rows(())

    def _go_on(self, drafted: Sequence[int]) -> Rows:
        return self._rows(drafted)

    def _rows(self, drafted: Sequence[int]) -> Rows:
        logits = self._backend.logits_after([*self._text, *drafted])[: self._num_tokens]
        return rows_of(np.asarray(logits, np.float32)[None], self._temperature)

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...
