"""Drafts without a model: proposes the tokens that followed the last earlier occurrence of the newest ones.

Saxena 2023, "Prompt Lookup Decoding". The longest run of tokens wins, the most recent of equally long ones: suffix
decoding over this text alone, whose chains count nothing and end nowhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM
from outrider.edge_client.drafting.copying.model import CopyModel, TokenizerFacts
from outrider.edge_client.drafting.copying.sequence import CopyRules


class PromptLookupModel(CopyModel):
    """Makes sequences without weights, of any length."""

    def __init__(
        self,
        num_tokens: int,
        tokenizer_fingerprint: str,
        eos_token_ids: tuple[int, ...] = (),
        max_ngram: int = DEFAULT_MAX_NGRAM,
    ) -> None:
        rules = CopyRules("lookup", max_ngram, chain_places=1, tree_places=32, min_chance=0.0)
        super().__init__(rules, TokenizerFacts(num_tokens, tokenizer_fingerprint, eos_token_ids))

    @classmethod
    def open(cls, directory: Path, *, max_ngram: int = DEFAULT_MAX_NGRAM) -> Self:
        """Opens any directory with a tokenizer.json. Raises `ModelError` without one."""
        if max_ngram < 1:
            raise UsageError(f"prompt lookup compares at least one token, not {max_ngram}")
        facts = TokenizerFacts.read(directory)
        return cls(facts.num_tokens, facts.fingerprint, facts.eos_token_ids, max_ngram)
