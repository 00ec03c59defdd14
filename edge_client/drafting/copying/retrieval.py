"""Drafts what followed the longest run of newest tokens in a datastore of other texts.

He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (2311.08252). The paper keeps a trie of what it found; here
the tree builder values continuations by their counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.copying.contexts import Contexts
from outrider.edge_client.drafting.copying.datastore import Datastore
from outrider.edge_client.drafting.copying.model import CopyModel, TokenizerFacts
from outrider.edge_client.drafting.copying.sequence import CopyRules

RULES = CopyRules("retrieval", reads_own_text=False)


class RetrievalModel(CopyModel):
    """Makes sequences without weights, of any length, that share a datastore."""

    def __init__(self, facts: TokenizerFacts, datastore: Datastore) -> None:
        super().__init__(RULES, facts)
        self.datastore = datastore

    @classmethod
    def open(cls, directory: Path, datastore: Path | None) -> Self:
        """Opens any directory with a tokenizer.json, and a datastore. Raises `UsageError` without one, and what
        `TokenizerFacts.read` and `Datastore` raise."""
        if datastore is None:
            raise UsageError(
                "--draft-strategy retrieval needs --datastore FILE: `edge-client draft datastore build` makes one"
            )
        facts = TokenizerFacts.read(directory)
        return cls(facts, Datastore(datastore, facts.fingerprint))

    def others(self) -> Sequence[Contexts]:
        """Returns the datastore's texts."""
        return (self.datastore.contexts,)
