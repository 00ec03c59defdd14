"""The shape of built trees, and what node values learn from verdicts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.common.tree import ROOT, Tree, check_parents
from outrider.common.types import SamplingParams, Signals, TokenIds
from outrider.edge_client.drafting.base import Stop
from outrider.edge_client.drafting.copying.contexts import GrowingContexts
from outrider.edge_client.drafting.copying.expander import CopyExpander
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import Continuations, TreeBudget, TreeDraft

VALUES = NodeValues()


class RandomExpander:
    """Tells a function of the path; at times nothing."""

    def __init__(self, seed: int, source: str = "draft", num_tokens: int = 12) -> None:
        self.num_runs = 0
        self.asked: list[list[TokenIds]] = []
        self._seed, self._source, self._num_tokens = seed, source, num_tokens

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        self.num_runs += 1
        self.asked.append(list(paths))
        return [self.tell(path) for path in paths]

    def tell(self, path: TokenIds) -> Continuations:
        rng = random.Random(f"{self._seed} {self._source} {path}")
        count = rng.choice([0, 1, 3, 8, 8, 8])
        gaps = sorted(rng.expovariate(0.7) for _ in range(count))
        ids = tuple(rng.sample(range(self._num_tokens), count))
        return Continuations(ids, tuple(gap - gaps[0] for gap in gaps), self._source)


BUDGETS = st.builds(TreeBudget, st.integers(0, 40), st.integers(0, 9), st.integers(1, 8))


@settings(max_examples=60, deadline=None)
@given(budget=BUDGETS, seed=st.integers(0, 99), num_sources=st.integers(1, 2))
def test_a_tree_is_depth_first_likeliest_first_without_equal_siblings_and_within_its_budget(
    budget: TreeBudget, seed: int, num_sources: int
) -> None:
    expanders = [RandomExpander(seed, source) for source in ("draft", "lookup-2")[:num_sources]]
    draft = TreeBuilder(VALUES, budget).build(expanders)
    check_parents(draft.parents, draft.token_ids, budget.num_nodes)
    tree = Tree(draft.parents)
    assert max(tree.depths, default=-1) < budget.max_depth
    assert len(expanders[0].asked) <= budget.max_depth
    assert len(draft.values) == len(draft.token_ids)
    assert len(draft.continuations) == (len(tree) + 1 if budget.num_nodes and budget.max_depth else 0)
    for node in (ROOT, *range(len(tree))):
        children = list(tree.children(node))
        assert len(children) <= budget.max_width
        of_children = [draft.values[child] for child in children]
        assert of_children == sorted(of_children, reverse=True)
        assert sum(of_children) <= (1.0 if node == ROOT else draft.values[node]) * num_sources + 1e-9
        inside = tree.below(node) if node != ROOT else list(range(len(tree)))
        assert inside == list(range(node + 1, node + 1 + len(inside))), "not depth-first"


def test_a_tree_of_one_row_a_run_holds_the_most_valuable_nodes_there_are() -> None:
    """Best-first, by its definition: expand the most valuable open node, then keep the best."""
    expander = RandomExpander(3)
    budget = TreeBudget(num_nodes=7, max_depth=7, max_width=8)
    draft = TreeBuilder(VALUES, budget).build([expander])
    found: dict[TokenIds, float] = {}

    def add(path: TokenIds, value: float) -> None:
        told = expander.tell(path)
        for token_id, chance in zip(told.token_ids, VALUES.chances(told), strict=True):
            found[(*path, token_id)] = value * chance

    add((), 1.0)
    expanded = set[TokenIds]()
    for _ in range(6):
        best = sorted(found, key=lambda path: -found[path])[:7]
        if path := next((each for each in best if each not in expanded and len(each) < 7), None):
            expanded.add(path)
            add(path, found[path])
    tree = Tree(draft.parents)
    paths = {tuple(draft.token_ids[each] for each in tree.path(node)) for node in range(len(tree))}
    assert paths == set(sorted(found, key=lambda path: -found[path])[:7])


def test_a_given_shape_is_what_every_tree_has_as_far_as_there_are_choices() -> None:
    class Telling(RandomExpander):
        def tell(self, path: TokenIds) -> Continuations:
            count = 1 if path == (11,) else 3
            ids = tuple(10 * (len(path) + 1) + rank for rank in range(count))
            return Continuations(ids, (0.0, 5.0, 6.0)[:count], "draft")

    shape = ((2,), (2, 0), (1,), (1, 1), (2, 0, 2), (0,), (2, 0, 0))
    budget = TreeBudget(7, 3, 8, shape=shape)
    expander = Telling(0)
    draft = TreeBuilder(VALUES, budget).build([expander])
    tree = Tree(draft.parents)
    paths = [tuple(draft.token_ids[each] for each in tree.path(node)) for node in range(len(tree))]
    assert paths == [(10,), (11,), (12,), (12, 20), (12, 20, 30), (12, 20, 32)], "(11,) has one choice"
    assert [sorted(each) for each in expander.asked] == [[()], [(11,), (12,)], [(12, 20)]], "a run a level"

    def drafted(num_nodes: int, max_depth: int) -> int:
        cut = TreeBudget(num_nodes, max_depth, 8, shape=shape)
        return len(TreeBuilder(VALUES, cut).build([Telling(0)]).token_ids)

    assert [drafted(number, 3) for number in (1, 2, 5)] == [1, 2, 4], "the first nodes are a shape too"
    assert drafted(7, 1) == 3


def test_a_rule_ends_paths_before_a_position_or_after_a_token_and_the_budget_goes_to_others() -> None:
    class Telling(RandomExpander):
        def tell(self, path: TokenIds) -> Continuations:
            signals = tuple(Signals(float(len(path)), nll, 0.5) for nll in (0.1, 2.0, 0.1))
            return Continuations((1, 2, 3), (0.0, 0.2, 0.4), "draft", signals)

    def rule(path: TokenIds, signals: Signals) -> Stop:
        if path[:1] == (1,) and signals.entropy_bits == 2:
            return Stop.BEFORE
        return Stop.AFTER if signals.nll > 1 else Stop.NO

    draft = TreeBuilder(VALUES, TreeBudget(20, 5, 3), rule).build([Telling(0)])
    tree = Tree(draft.parents)
    paths = {tuple(draft.token_ids[each] for each in tree.path(node)) for node in range(len(tree))}
    assert len(paths) == 20, "what is left out leaves room for others"
    assert (1, 1) in paths and not any(path[0] == 1 and len(path) > 2 for path in paths)
    assert any(path[-1] == 2 for path in paths) and not any(2 in path[:-1] for path in paths)
    assert any(len(path) > 3 for path in paths)
    assert draft.doubted == Signals(2.0, 0.1, 0.5), "of the likeliest path, (1, 1)"
    assert [signals.nll for signals in draft.signals] == [2.0 if t == 2 else 0.1 for t in draft.token_ids]
    nothing = TreeBuilder(VALUES, TreeBudget(20, 5, 3), lambda *_: Stop.BEFORE).build([Telling(0)])
    assert nothing.token_ids == () and nothing.doubted is not None


def test_equal_children_of_two_sources_are_one_node_that_both_learn_from() -> None:
    class Telling:
        num_runs = 1

        def __init__(self, told: Continuations) -> None:
            self._told = told

        def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
            return [self._told] * len(paths)

    model = Telling(Continuations((4, 5), (0.0, 1.0), "draft"))
    copy = Telling(Continuations((5, 6), (0.0, 0.0), "lookup-3"))
    values = NodeValues()
    draft = TreeBuilder(values, TreeBudget(3, 1, 3)).build([model, copy])
    assert draft.token_ids == (4, 5, 6)
    assert draft.values[1] == max(values.chances(model._told)[1], values.chances(copy._told)[0])
    before, alone = values.chances(copy._told), values.chances(model._told)
    for _ in range(20):
        values.observe(draft, (1,), None)
    assert values.chances(copy._told)[0] > before[0]
    assert values.chances(model._told)[1] > alone[1]


def test_copies_follow_every_earlier_occurrence_the_most_frequent_first() -> None:
    index = GrowingContexts(4)
    index.extend([1, 2, 7, 5, 1, 2, 8, 5, 1, 2, 7, 9, 1, 2, 6, 1, 2])
    expander = CopyExpander(index, [index], "lookup", 32)
    root, crossing, inner, nothing = expander.expand([(), (7,), (7, 5), (11,)])
    assert (root.token_ids, root.source) == ((7, 6, 8), "lookup-2")
    assert root.gaps == (0.0, math.log(2), math.log(2))
    assert (crossing.token_ids, crossing.source) == ((9, 5), "lookup-3-4")
    assert (inner.token_ids, inner.source) == ((1,), "lookup-3-4")
    assert nothing.token_ids == ()
    model = PromptLookupModel(100, "")
    sequence = model.sequence(SamplingParams())
    sequence.commit(index.token_ids)
    draft = sequence.propose_tree(TreeBudget(6, 3, 2), NodeValues())
    assert draft.token_ids[0] == 7
    assert len(draft.token_ids) == 6
    assert draft.num_runs == 0


def observe_source(values: NodeValues, tau: float, covered: float, num_observed: int) -> None:
    """A source whose continuations hold the target's token with `covered`, by gaps of `tau`."""
    rng = random.Random(2)
    for _ in range(num_observed):
        gaps = [0.0, *sorted(rng.expovariate(0.5) for _ in range(5))]
        weights = [math.exp(-gap / tau) for gap in gaps]
        found = rng.choices(range(6), weights)[0] if rng.random() < covered else 6
        told = Continuations(tuple(range(6)), tuple(gaps), "draft")
        values.observe(TreeDraft((), (), continuations=((told,),)), (), found)


def test_node_values_learn_tau_and_coverage_of_a_source() -> None:
    for tau in (0.2, 1.0):
        values = NodeValues()
        observe_source(values, tau, 0.9, 1500)
        assert abs(math.log(values.tau("draft") / tau)) < 0.3
        told = Continuations((1, 2), (0.0, 1.0), "draft")
        chances = values.chances(told)
        assert abs(sum(chances) - 0.9) < 0.05
        assert abs(math.log(chances[0] / chances[1]) - 1 / values.tau("draft")) < 1e-9


def test_a_verdict_teaches_each_accepted_node_and_the_token_after_them_once() -> None:
    told = [Continuations((token_id, 50), (0.0, 1.0), f"lookup-{token_id}") for token_id in range(4)]
    draft = TreeDraft((0, 1, 2), (), parents=(-1, 0, -1), continuations=tuple((each,) for each in told))
    fresh = NodeValues(), NodeValues()
    values = NodeValues()
    values.observe(draft, (0, 1), 2)  # the root's 0, node 0's 1, node 1's 2; node 2 was not reached
    for each, is_better in zip(told, (True, True, True, None), strict=True):
        found, before = sum(values.chances(each)), sum(fresh[0].chances(each))
        assert (found > before) == bool(is_better)
        assert is_better is not None or found == before
    fresh[1].observe(draft, (0,), None)
    assert sum(fresh[1].chances(told[1])) == sum(fresh[0].chances(told[1])), "the text ended after node 0"
