"""Makes sequences that copy: what all strategies without weights have in common."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import num_tokens, tokenizer_fingerprint
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.copying.contexts import Contexts
from outrider.edge_client.drafting.copying.sequence import CopyRules, CopySequence
from outrider.edge_client.drafting.export.hf_config import read_eos_token_ids
from outrider.edge_client.drafting.spec import SPEC_FILE, TOKENIZER_FILE


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Holds what a draft that copies knows of its tokenizer."""

    num_tokens: int
    fingerprint: str
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads any directory with a tokenizer.json. Raises `ModelError` without one.

        A draft.json or the target's own configuration beside it has the end-of-text ids, which matter only to
        tokens kept unverified.
        """
        tokenizer = directory / TOKENIZER_FILE
        return cls(num_tokens(tokenizer), tokenizer_fingerprint(tokenizer), _eos_token_ids(directory))


class CopyModel:
    """Implements `DraftModel` without weights, for texts of any length."""

    max_context = sys.maxsize
    signal_names = ()

    def __init__(self, rules: CopyRules, facts: TokenizerFacts) -> None:
        self.rules, self.facts = rules, facts
        self.num_tokens, self.eos_token_ids = facts.num_tokens, facts.eos_token_ids
        self.tokenizer_fingerprint = facts.fingerprint

    @property
    def fingerprint(self) -> str:
        """Returns a SHA-256 over tokenizer and rules."""
        content = f"{self.rules} {self.tokenizer_fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> CopySequence:
        """Returns an empty sequence. Sampling parameters do not change a copy."""
        return CopySequence(self.rules, self.num_tokens, sampling, num_support > 0, self.others())

    def of_owner(self, owner: str) -> CopyModel:
        """See `ServesOwners.of_owner`; the same model where it keeps no texts."""
        return self

    def others(self) -> Sequence[Contexts]:
        """Returns the texts that are searched beside a sequence's own."""
        return ()

    def close(self) -> None:
        """Does nothing: there are no weights."""

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
