"""Drafts one co-located sequence from the target's own states: what all heads share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import RowsSequence
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft


def hidden_size(backend: PagedBackend) -> int:
    """Returns the width of the target's embeddings and states."""
    return int(backend.decoder.embed(torch.zeros(1, dtype=torch.int64, device=backend.device)).shape[-1])


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Names a trained head: what kind it is, how far it drafts, and its bytes."""

    name: str
    max_depth: int  # tokens of a path
    feature_layers: tuple[int, ...]
    reads_all: bool  # features of every token, not of the last alone
    fingerprint: str


class Head:
    """Implements `DraftSource` and `TellsFeatures`: weights that sequences share, beside their target."""

    def __init__(
        self, backend: PagedBackend, facts: HeadFacts, weights: nn.Module, kind: type[HeadSequence]
    ) -> None:
        """`kind` drafts with such weights."""
        self.backend, self.facts, self.weights = backend, facts, weights
        self._kind = kind
        self.name, self.reads_all = facts.name, facts.reads_all
        self.num_tokens, self.max_context = backend.num_tokens, backend.max_context
        self.eos_token_ids = backend.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = facts.fingerprint, backend.tokenizer_fingerprint
        self.signal_names = ("nll", "entropy", "margin")
        backend.feature_layers = tuple(sorted({*backend.feature_layers, *facts.feature_layers}))

    def last_features(self, rows: slice) -> torch.Tensor:
        """Returns the features [tokens, size] of some tokens of the target's last forward."""
        features = self.backend.features
        return torch.cat([features[layer][rows] for layer in self.facts.feature_layers], dim=-1)

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the input embeddings [n, size] of ids."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.backend.device)
        return self.backend.decoder.embed(ids)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> HeadSequence:
        """Returns a new, empty sequence."""
        sampler = DraftSampler(sampling, self.eos_token_ids, num_support)
        return self._kind(self, sampler, sampling.temperature, num_prompt_tokens)

    def close(self) -> None:
        """Stops the target from keeping features."""
        self.backend.feature_layers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HeadSequence(RowsSequence):
    """Is a sequence whose rows come from a head. It drafts nothing until it has read features."""

    def __init__(
        self, head: Head, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(sampler, head.num_tokens, head.max_context, num_prompt_tokens)
        self._head, self._temperature = head, temperature
        self.reads_all = head.reads_all
        self._features: Any = None  # [1, size], of the last token but one

    @property
    def is_ready(self) -> bool:
        """Returns whether the features are known that the next draft begins with."""
        return self._features is not None

    def read(self, features: FeatureLog) -> None:
        """Takes the features up to the last token but one. The last one's `commit` follows."""
        self._features = features.take()

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples a chain, no longer than the head reaches."""
        if not self.is_ready:
            return Draft((), ())
        with torch.inference_mode():
            return super().propose(min(num_draft_tokens, self._head.facts.max_depth), should_stop)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """Drafts a tree, no deeper than the head reaches."""
        if not self.is_ready:
            return TreeDraft((), ())
        budget = replace(budget, max_depth=min(budget.max_depth, self._head.facts.max_depth))
        with torch.inference_mode():
            return super().propose_tree(budget, values, rule)

    def tell(self, rows: Rows, path: TokenIds, has_signals: bool = False) -> Continuations:
        """Returns what may follow a path. What is learned of it is apart for each depth."""
        told = super().tell(rows, path, has_signals)
        return replace(told, source=f"{self._head.name} {len(path)}")

    def close(self) -> None:
        """Frees the features."""
        self._features = None

    def check_integrity(self) -> None:
        """Asserts nothing: there is no state beside the committed tokens."""

    def _rows(self, logits: torch.Tensor) -> Rows:
        """Returns the rows of logits [k, vocab_size]."""
        return rows_of(logits[:, : self._num_tokens].float().cpu().numpy(), self._temperature)

    def _begin(self) -> Rows:
        return self.feed_root()

    def _go_on(self, drafted: Sequence[int]) -> Rows:
        return next(iter(self.feed_paths([tuple(drafted)])))[0]

    @abstractmethod
    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        """See `RowsSequence.feed_paths`. Paths are shorter than `max_depth`."""
