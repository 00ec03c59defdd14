"""Drafts what followed the longest run of newest tokens in this text and in earlier texts of the same user.

Oliaro et al. 2024, "SuffixDecoding" (2411.04975): how often tokens followed a run values them, the length of the run
and their counts bound a draft. The paper keeps two suffix trees; here sorted contexts find the same runs and counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.common.errors import UsageError
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.copying.contexts import MAX_MATCH, Contexts
from outrider.edge_client.drafting.copying.earlier import TextsByOwner
from outrider.edge_client.drafting.copying.model import CopyModel, TokenizerFacts
from outrider.edge_client.drafting.copying.sequence import CopyRules, CopySequence

RULES = CopyRules("suffix")

log = logging.getLogger("outrider")


class SuffixModel(CopyModel):
    """Makes sequences without weights, of any length, for one user."""

    def __init__(self, facts: TokenizerFacts, texts: TextsByOwner, owner: str = "") -> None:
        super().__init__(RULES, facts)
        self._texts, self._owner = texts, owner

    @classmethod
    def open(cls, directory: Path, max_tokens: int, store: Path | None = None) -> Self:
        """Opens any directory with a tokenizer.json; earlier texts, at most `max_tokens` a user, are kept in `store`
        too where it is given. Raises `ModelError` without a tokenizer, `UsageError` for a store that cannot be used."""
        facts = TokenizerFacts.read(directory)
        return cls(facts, TextsByOwner(facts.fingerprint, max_tokens, store))

    def of_owner(self, owner: str) -> SuffixModel:
        """See `ServesOwners.of_owner`."""
        return SuffixModel(self.facts, self._texts, owner)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> SuffixSequence:
        """Returns an empty sequence, which reads the texts that ended before it."""
        return SuffixSequence(self, sampling, num_support > 0)

    def remember(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Keeps a text that has ended: what was generated, after the end of its prompt. Earlier texts that cannot be
        read are logged, and this one is not kept: it is its reader's whatever happens."""
        try:
            texts = self._texts.of(self._owner)
        except UsageError as error:
            log.warning("%s; the text that ended is not kept", error)
            return
        texts.add(token_ids[max(0, num_prompt_tokens - MAX_MATCH) :])

    def others(self) -> Sequence[Contexts]:
        """Returns the user's earlier texts."""
        return self._texts.of(self._owner).contexts


class SuffixSequence(CopySequence):
    """Is a sequence whose text is searched by later ones once it has ended."""

    def __init__(self, model: SuffixModel, sampling: SamplingParams, has_supports: bool) -> None:
        super().__init__(model.rules, model.num_tokens, sampling, has_supports, model.others())
        self._model = model

    def remember(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """See `Remembers.remember`."""
        self._model.remember(token_ids, num_prompt_tokens)
