"""What co-located drafting asks of its sources and their sequences, beside what a draft of an edge has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from outrider.cloud_verifier.backends.base import KVSequence
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.common.types import Draft
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.trees import TreeBudget

if TYPE_CHECKING:
    from outrider.edge_client.drafting.node_values import NodeValues


@runtime_checkable
class ReadsFeatures(Protocol):
    """Is a draft sequence that continues from the target's states."""

    reads_all: bool  # of every token, not of the last alone

    def read(self, features: FeatureLog) -> None:
        """Takes the features up to the last token but one. The last one's `commit` follows."""


@runtime_checkable
class ReadsChoices(Protocol):
    """Is a draft sequence that continues from what the target chose after each drafted token, accepted or not."""

    def read_choices(self, choices: Sequence[int]) -> None:
        """Takes the target's tokens after the last tree: after its root, then after each node. `commit` follows."""


@runtime_checkable
class UsesTargetKv(Protocol):
    """Is a draft sequence that drafts on the target's own KV of its session."""

    kv: KVSequence | None  # of all committed tokens but the last, before a draft

    @property
    def states(self) -> Any:
        """Returns the states of the tokens that the last draft ran ahead, a tensor; None where the forward has no use
        for them."""


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """Says what is to be drafted for one sequence: a chain of `num_tokens` at most, or where `budget` is given a tree,
    with `values` by a sequence that `ProposesTrees`; another one drafts a chain instead."""

    num_tokens: int
    budget: TreeBudget | None = None
    values: NodeValues | None = None


@runtime_checkable
class DraftsTogether(Protocol):
    """Is a source that drafts for several sequences at once, on the engine's own thread."""

    def propose_together(
        self, sequences: Sequence[Any], wanted: Sequence[WantedDraft]
    ) -> list[Draft | Exception]:
        """Returns the draft of each of its sequences, or what went wrong with it."""


class DraftSource(DraftModel, Protocol):
    """Is what may draft beside the verifier's draft model."""

    name: str  # what an opening asks for (`draft_source`)


@runtime_checkable
class TellsFeatures(Protocol):
    """Is a source that reads the target's states: a trained head."""

    reads_all: bool  # features of every token, not of the last alone

    def last_features(self, rows: slice) -> Any:
        """Returns the features of some tokens of the target's last forward, a tensor [tokens, size]."""
