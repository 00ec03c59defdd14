"""Drafts co-located sequences from the target's own states: what all heads share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.source import WantedDraft
from outrider.common.errors import ModelError
from outrider.common.types import Draft, SamplingParams, TokenIds
from outrider.edge_client.drafting.base import NodeRule, ShouldStop
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.rows.sequence import SampledText, TellsOfRows
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft

Row = Rows | Continuations | ModelError
"""Is what a head computes after one path: the whole row, or what it tells of the next node, or is wrong with it, where
that is found on the device."""

Drafting = Generator[Sequence[TokenIds], Sequence[Row], Draft]
"""Is a draft under way: it yields the paths after which it wants rows, the empty one alone at first, takes the row
after each, and returns the draft."""

# Paths of the sequence that has this number among those of a run.
Asked = tuple[int, Sequence[TokenIds]]


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


class HeadRun(ABC):
    """Computes rows for sequences that draft at the same time, for all of them at once."""

    def __init__(self, head: Head, sequences: Sequence[HeadSequence]) -> None:
        """All sequences are ready."""
        self._head, self._sequences = head, sequences

    @abstractmethod
    def roots(self) -> list[Row]:
        """Returns the row after the committed tokens of each sequence."""

    @abstractmethod
    def after(self, asked: Sequence[Asked]) -> list[list[Row]]:
        """Returns the rows after paths of some sequences. A path is shorter than `max_depth`, and was asked for before
        without its last token."""

    def _read(self, logits: torch.Tensor, of: Sequence[tuple[int, int, int]]) -> list[Row]:
        """Returns what sequences read of logits [n, vocab_size]: `of` has for each a row of these, the number of the
        sequence, and the length of the path."""
        told: dict[int, Row] = {}
        if self._head.backend.has_device_logits:
            from outrider.cloud_verifier.heads.device_tops import TopOf, read_tops

            at = [index for index, (_, number, _) in enumerate(of) if self._sequences[number].wants_tops]
            asked: list[TopOf] = []
            for row, number, length in (of[index] for index in at):
                each = self._sequences[number]
                noise = each.temperature, each.seed, each.position + length
                asked.append(TopOf(row, *noise, self._head.source_of(length)))
            told |= zip(at, read_tops(logits, self._head.num_tokens, asked), strict=True)
        if len(told) < len(of):
            on_host = logits[:, : self._head.num_tokens].float().cpu().numpy()
            of_sequence: dict[int, list[int]] = defaultdict(list)
            for index, (_, number, _) in enumerate(of):
                if index not in told:
                    of_sequence[number].append(index)
            for number, indices in of_sequence.items():
                rows = self._sequences[number].rows(on_host[[of[index][0] for index in indices]])
                told |= {index: rows.one(place) for place, index in enumerate(indices)}
        return [told[index] for index in range(len(of))]


class Head:
    """Implements `DraftSource`, `DraftsTogether` and `TellsFeatures`: weights that sequences share, beside their
    target."""

    def __init__(
        self,
        backend: PagedBackend,
        facts: HeadFacts,
        weights: nn.Module,
        run: type[HeadRun],
        sequence: type[HeadSequence] | None = None,
    ) -> None:
        """`run` computes with such weights, for sequences of the class `sequence`, `HeadSequence` where None."""
        self.backend, self.facts, self.weights = backend, facts, weights
        self._run, self._sequence = run, sequence or HeadSequence
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

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input embeddings [*, size] of ids, int64 [*] on the target's device."""
        embedded = self.backend.decoder.embed(token_ids.flatten())
        return embedded.view(*token_ids.shape, -1)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> HeadSequence:
        """Returns a new, empty sequence."""
        sampler = DraftSampler(sampling, self.eos_token_ids, num_support)
        return self._sequence(self, sampler, sampling.temperature, num_prompt_tokens)

    def propose_together(
        self, sequences: Sequence[HeadSequence], wanted: Sequence[WantedDraft]
    ) -> list[Draft | Exception]:
        """See `DraftsTogether.propose_together`."""
        return self.draft(
            sequences, [each.drafting(its) for each, its in zip(sequences, wanted, strict=True)]
        )

    @torch.inference_mode()
    def start(self, sequences: Sequence[HeadSequence]) -> HeadRun:
        """Returns the run of sequences that begin to draft."""
        return self._run(self, sequences)

    @torch.inference_mode()
    def draft(
        self, sequences: Sequence[HeadSequence], drafting: Sequence[Drafting]
    ) -> list[Draft | Exception]:
        """Returns the draft of each sequence, or what went wrong with it. What they ask for at the same time is one
        run."""
        drafts: dict[int, Draft | Exception] = {}
        asked: dict[int, Sequence[TokenIds]] = {}

        def go_on(number: int, rows: Sequence[Row] | None) -> None:
            try:
                one = drafting[number]
                asked[number] = next(one) if rows is None else one.send(rows)
            except StopIteration as end:
                drafts[number] = end.value
            except Exception as error:  # of this sequence's sampling alone
                drafts[number] = error

        for number in range(len(sequences)):
            go_on(number, None)
        if asked:
            numbers = list(asked)
            place = {number: index for index, number in enumerate(numbers)}
            run = self.start([sequences[number] for number in numbers])
            given: list[list[Row]] = [[row] for row in run.roots()]
            while numbers:
                asked.clear()
                for number, rows in zip(numbers, given, strict=True):
                    go_on(number, rows)
                numbers = list(asked)
                given = run.after([(place[number], asked[number]) for number in numbers]) if numbers else []
        return [drafts[number] for number in range(len(sequences))]

    def source_of(self, length: int) -> str:
        """Returns the name of what is learned together of continuations after paths of a length: each depth apart."""
        return f"{self.name} {length}"

    def close(self) -> None:
        """Stops the target from keeping features."""
        self.backend.feature_layers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HeadSequence(SampledText):
    """Is a sequence whose rows come from a head. It drafts nothing until it has read features."""

    def __init__(
        self, head: Head, sampler: DraftSampler, temperature: float, num_prompt_tokens: int | None
    ) -> None:
        super().__init__(sampler, head.num_tokens, head.max_context, num_prompt_tokens)
        self._head = head
        self.temperature, self.seed = temperature, sampler.seed
        self.reads_all = head.reads_all
        self.features: Any = None  # [n, size], the last of them of the last token but one
        self.wants_tops = False  # of each row alone, for the draft under way

    @property
    def token_ids(self) -> Sequence[int]:
        """Returns the committed ids."""
        return self._text

    @property
    def is_ready(self) -> bool:
        """Returns whether the features are known that the next draft begins with."""
        return self.features is not None

    def read(self, features: FeatureLog) -> None:
        """Takes the features up to the last token but one. The last one's `commit` follows."""
        self.features = features.take()

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        """Samples a chain, no longer than the head reaches."""
        return self._alone(self._chain(num_draft_tokens, should_stop))

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """Drafts a tree, no deeper than the head reaches."""
        draft = self._alone(self._tree(budget, values, rule))
        assert isinstance(draft, TreeDraft), "a tree was asked for"
        return draft

    def drafting(self, wanted: WantedDraft) -> Drafting:
        """Returns what is wanted, under way."""
        if wanted.budget is None or wanted.values is None:
            return self._chain(wanted.num_tokens)
        return self._tree(wanted.budget, wanted.values)

    def tell(self, rows: Rows, path: TokenIds, has_signals: bool = False) -> Continuations:
        """Returns what may follow a path."""
        told = super().tell(rows, path, has_signals)
        return replace(told, source=self._head.source_of(len(path)))

    def rows(self, logits: NDArray[np.float32]) -> Rows:
        """Returns the rows of logits [k, num_tokens]."""
        return rows_of(logits, self.temperature)

    def close(self) -> None:
        """Frees the features."""
        self.features = None

    def check_integrity(self) -> None:
        """Asserts nothing: there is no state beside the committed tokens."""

    def _alone(self, drafting: Drafting) -> Draft:
        (draft,) = self._head.draft([self], [drafting])
        if isinstance(draft, Exception):
            raise draft
        return draft

    def _chain(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Drafting:
        chain = None
        if self.is_ready:
            chain = self.begin_chain(min(num_draft_tokens, self._head.facts.max_depth), should_stop)
        if chain is None:
            return Draft((), ())
        self.wants_tops = False
        (row,) = yield [()]
        while chain.add(_whole(row)):
            (row,) = yield [tuple(chain.token_ids)]
        return chain.draft()

    def _tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> Drafting:
        begun = None
        if self.is_ready:
            budget = replace(budget, max_depth=min(budget.max_depth, self._head.facts.max_depth))
            begun = self.begin_tree(budget, values, rule)
        if begun is None:
            return TreeDraft((), ())
        growing, tells = begun
        self.wants_tops = rule is None and self._sampler.has_plain_trees
        try:
            paths = next(growing)
            while True:
                rows = yield paths
                paths = growing.send([[_told(tells, *each) for each in zip(rows, paths, strict=True)]])
        except StopIteration as end:
            draft: TreeDraft = end.value
        return draft


def _told(tells: TellsOfRows[Any], row: Row, path: TokenIds) -> Any:
    if isinstance(row, ModelError):
        raise row
    return row if isinstance(row, Continuations) else tells.of(row, path)


def _whole(row: Row) -> Rows:
    assert isinstance(row, Rows), "a chain is sampled from whole rows"
    return row
