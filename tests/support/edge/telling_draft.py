"""Drafts of the other fakes that tell signals: hard where the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.common.tree import ROOT, Tree
from outrider.common.types import Draft, SamplingParams, Signals
from outrider.edge_client.drafting.base import (
    DraftSequence,
    NodeRule,
    ProposesTrees,
    ShouldStop,
    Stop,
    ended,
)
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.gate.gate import Gate, GateSettings, GateUse
from outrider.edge_client.gate.thresholds import GateThresholds

SURE = Signals(entropy_bits=0.1, nll=0.1, margin=0.9)
HARD_PLACE = Signals(entropy_bits=3.0, nll=0.1, margin=0.9)
HARD_TOKEN = Signals(entropy_bits=0.1, nll=3.0, margin=0.9)

Tell = Callable[[int], Signals]  # by the token's position in the text


def make_gate(use: GateUse, max_hard_ratio: float = 0.0) -> Gate:
    return Gate(GateSettings(use, GateThresholds(nll=1.0, entropy=1.0), max_hard_ratio))


def every(num: int, signals: Signals, start: int = 0) -> Tell:
    return lambda position: signals if position % num == start else SURE


@dataclass
class TellingDraft:
    """`model` as a draft whose token at position t has the signals tell(t)."""

    model: Any
    tell: Tell

    signal_names = ("nll", "entropy", "margin")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> TellingSequence:
        made = self.model.sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)
        return TellingSequence(made, self.tell)


@dataclass
class TellingSequence:
    sequence: DraftSequence
    tell: Tell

    @property
    def position(self) -> int:
        return self.sequence.position

    def commit(self, token_ids: Sequence[int]) -> None:
        self.sequence.commit(token_ids)

    def truncate(self, position: int) -> None:
        self.sequence.truncate(position)

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        draft = self.sequence.propose(num_draft_tokens)
        positions = range(self.position, self.position + len(draft.token_ids))
        return ended(replace(draft, signals=tuple(map(self.tell, positions))), should_stop)

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        assert isinstance(self.sequence, ProposesTrees)
        draft = self.sequence.propose_tree(budget, values)
        return draft if rule is None else pruned(draft, rule, lambda depth: self.tell(self.position + depth))

    def close(self) -> None:
        self.sequence.close()

    def check_integrity(self) -> None:
        self.sequence.check_integrity()


def pruned(draft: TreeDraft, rule: NodeRule, tell: Callable[[int], Signals]) -> TreeDraft:
    """What a rule leaves of a tree whose nodes have the signals `tell` of their depth."""
    tree = Tree(draft.parents)
    place = {ROOT: ROOT}  # of the nodes that are left
    ended, doubted = set[int](), dict[int, Signals]()
    for node, parent in enumerate(draft.parents):
        if parent not in place or parent in ended:
            continue
        path = tuple(draft.token_ids[each] for each in tree.path(node))
        signals = tell(tree.depths[node])
        stop = rule(path, signals)
        if stop is Stop.BEFORE:
            doubted[parent] = signals
            continue
        place[node] = len(place) - 1
        if stop is Stop.AFTER:
            ended.add(node)
    left = [node for node in place if node != ROOT]
    parents = tuple(place[draft.parents[node]] for node in left)
    main_end = left[len(Tree(parents).runs[0]) - 1] if left else ROOT
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node] for node in left),
        signals=tuple(tell(tree.depths[node]) for node in left),
        doubted=doubted.get(main_end),
        parents=parents,
        values=tuple(draft.values[node] for node in left),
        continuations=tuple(draft.continuations[node + 1] for node in (ROOT, *left)),
    )
