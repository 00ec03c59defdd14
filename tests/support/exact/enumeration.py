"""The exact law of the first tokens that a verification method writes, over as many rounds as they take.

The method's own code runs over rows and draws that branch (`support.branching`). Rounds follow each other as
the engine and the edge have it: draft from q, verify, text += accepted + correction, again.

Two histories with the same text are one state, once what is known of keys that may be asked again is the same
too. Keys are (purpose, position, index); those before (length of the text, candidates seen) must not be asked
again, which every round asserts, so what is known of them may be forgotten.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any
from unittest import mock

from support.exact.branching import (
    PROMPT_LENGTH,
    BranchingDraws,
    BranchingRows,
    BranchingUniform,
    Lazy,
    LazyDraft,
    Rules,
    Text,
    World,
)
from support.exact.chance import Chance, Key, Known, all_outcomes
from support.exact.trees import DrawnTree, LazyTree, TreeRows, cut_to_depth, first_nodes

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, VerificationMethod
from outrider.common.noise.draws import Purpose
from outrider.common.sampling import support as edge_support
from outrider.common.types import CorrectionKind

Law = dict[Text, float]

_States = dict[tuple[Text, frozenset[tuple[Key, Any]]], float]


def target_law(world: World, rules: Rules | None = None) -> Law:
    """The law of the first tokens that the target alone writes; a text ends with a stop id."""
    rules = rules or Rules()
    law: Law = {(): 1.0}
    for _ in range(rules.num_tokens):
        longer: Law = {}
        for text, prob in law.items():
            if text and text[-1] in rules.stop_ids:
                longer[text] = prob
                continue
            longer |= {(*text, i): prob * p for i, p in enumerate(world.target(text)) if p > 0}
        law = longer
    return law


def written_law(method: VerificationMethod, world: World, rules: Rules | None = None) -> Law:
    """The law of the first `rules.num_tokens` tokens that `method` writes."""
    rules = rules or Rules()
    rounds = _Rounds(method, world, rules)
    states: list[_States] = [{} for _ in range(rules.num_tokens + 1)]  # by the length of the text
    states[0][(), frozenset()] = 1.0
    law: Law = {}
    for shorter in states:
        for (text, known), prob in shorter.items():
            if len(text) == rules.num_tokens or (text and text[-1] in rules.stop_ids):
                law[text] = law.get(text, 0.0) + prob
                continue
            for state, share in rounds.after(text, dict(known)).items():
                longer = states[len(state[0])]
                longer[state] = longer.get(state, 0.0) + prob * share
    return law


def max_error(law: Law, expected: Law) -> float:
    return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected})


def total_variation(law: Law, expected: Law, num_tokens: int = Rules.num_tokens) -> float:
    """Of the first `num_tokens` tokens."""
    difference: Law = {}
    for sign, each in ((1, law), (-1, expected)):
        for text, prob in each.items():
            difference[text[:num_tokens]] = difference.get(text[:num_tokens], 0.0) + sign * prob
    return math.fsum(map(abs, difference.values())) / 2


class _Rounds:
    def __init__(self, method: VerificationMethod, world: World, rules: Rules) -> None:
        self._method, self._world, self._rules = method, world, rules
        self._after_candidates = cache(self._sum_candidates)

    def after(self, text: Text, known: Known) -> _States:
        """P(text, what is known of keys that may come again) after a round and the candidates it asks for."""
        after, asking = self._one(text, known, 0)
        for (new_text, num_seen), prob in asking.items():
            for state, share in self._after_candidates(new_text, num_seen).items():
                after[state] = after.get(state, 0.0) + prob * share
        return after

    def _sum_candidates(self, text: Text, num_seen: int) -> _States:
        """Rounds that ask for more candidates until one passes. They are alike (the second is run to see
        it), so their sum is a geometric series."""
        passed, refused = self._one(text, {}, num_seen)
        again, _ = self._one(text, {}, 2 * num_seen)
        assert passed.keys() == again.keys()
        assert all(abs(passed[state] - again[state]) < 1e-12 for state in passed)
        assert refused.keys() <= {(text, 2 * num_seen)}, "it settled for something else than asking again"
        total = math.fsum(passed.values())
        assert abs(total + sum(refused.values()) - 1) < 1e-12
        return {state: prob / total for state, prob in passed.items()}

    def _one(self, text: Text, known: Known, num_seen: int) -> tuple[_States, dict[tuple[Text, int], float]]:
        """States after one round; and (text, candidates seen) where none of the candidates passed."""
        after: _States = {}
        asking: dict[tuple[Text, int], float] = {}

        def run(chance: Chance) -> tuple[Text, int]:
            return self._run(text, num_seen, chance)

        for (new_text, new_seen), chance in all_outcomes(run, known):
            assert all(key[1:] >= _least(text, num_seen) for key in chance.asked), (text, chance.asked)
            if new_seen:
                asking[new_text, new_seen] = asking.get((new_text, new_seen), 0.0) + chance.probability
                continue
            least = _least(new_text, 0)
            state = (new_text, frozenset((k, v) for k, v in chance.known.items() if k[1:] >= least))
            after[state] = after.get(state, 0.0) + chance.probability
        return after, asking

    def _run(self, text: Text, num_seen: int, chance: Chance) -> tuple[Text, int]:
        """One round; returns the text after it, and how many candidates were refused if it must ask."""
        rules = self._rules
        position = PROMPT_LENGTH + len(text)
        num_left = rules.num_tokens - len(text) - (0 if rules.is_pipelined else 1)
        num_draft_tokens = 0 if num_seen else min(rules.num_draft_tokens, num_left)
        draft, rows = self._draft(text, num_draft_tokens, chance)
        round_input = RoundInput(
            rows=rows,
            draws=BranchingDraws(rules, position, chance),
            position=position,
            draft_tokens=Lazy(draft.num_tokens, draft.token),  # type: ignore[arg-type]
            draft_probs=Lazy(draft.num_tokens, draft.prob),  # type: ignore[arg-type]
            supports=Lazy(draft.num_tokens, draft.support),  # type: ignore[arg-type]
            stop_ids=rules.stop_ids,
            method_params=rules.method_params,
            candidates_from=num_seen,
            is_pipelined=rules.is_pipelined and num_draft_tokens > 0,
            tree=draft.tree if isinstance(draft, LazyTree) else None,
        )
        outcome = self._method.verify(_cut(round_input, draft, rules))
        nodes = outcome.accepted_nodes if rules.parents else range(outcome.accepted_len)
        new_text = (*text, *(draft.token(index) for index in nodes))
        if outcome.correction_kind is not CorrectionKind.NONE:
            return (*new_text, outcome.correction), 0
        if outcome.candidates:
            return self._choose(outcome, new_text, num_seen, chance)
        assert new_text != text, "a round that commits nothing"
        return new_text, 0

    def _draft(self, text: Text, num_draft_tokens: int, chance: Chance) -> tuple[LazyDraft, BranchingRows]:
        world, rules = self._world, self._rules
        if not rules.parents:
            chain = LazyDraft(world, rules, text, num_draft_tokens, chance)
            return chain, BranchingRows(world, text, chain, chance)
        parents = cut_to_depth(rules.parents, num_draft_tokens)
        if rules.is_coupled:
            tree = LazyTree(world, rules, text, parents, chance)
        else:
            tree = DrawnTree(world, rules, text, parents, chance, rules.grow)
        return tree, TreeRows(world, text, tree, chance)

    def _choose(self, outcome: Outcome, text: Text, num_seen: int, chance: Chance) -> tuple[Text, int]:
        """The edge's own choice among candidates, by the support it kept; its uniform numbers branch."""

        def uniform(seed: int, start: int, offset: int, purpose: int) -> BranchingUniform:
            return BranchingUniform((Purpose(purpose), start, offset), chance)

        with mock.patch.object(edge_support, "uniform", uniform):
            chosen = edge_support.choose_candidate(
                self._world.support(text), outcome.candidates, 0, PROMPT_LENGTH + len(text), num_seen
            )
        if chosen is None:
            return text, num_seen + len(outcome.candidates)
        return (*text, chosen), 0


def _least(text: Text, num_seen: int) -> tuple[int, int]:
    """The (position, index) of the first key that a round at `text` may ask."""
    return (PROMPT_LENGTH + len(text), num_seen)


def _cut(round_input: RoundInput, draft: LazyDraft, rules: Rules) -> RoundInput:
    """The round as the verifier has it where a grammar takes too much after a drafted token."""
    if rules.is_costly is None:
        return round_input
    tree = round_input.tree
    nodes = [
        node
        for node in range(len(round_input.draft_tokens))
        if tree is None or node in tree.children(tree.parents[node])
    ]
    last = next((node for node in nodes if rules.is_costly(draft.text_before(node + 1))), None)
    if last is None:
        return round_input
    num = last + 1
    return dataclasses.replace(
        round_input,
        draft_tokens=round_input.draft_tokens[:num],
        draft_probs=Lazy(lambda: num, draft.prob),  # type: ignore[arg-type]
        supports=Lazy(lambda: num, draft.support),  # type: ignore[arg-type]
        tree=None if tree is None else first_nodes(tree, num),
        is_cut=True,
    )
