"""Trees whose children are drawn: from their node's support, without replacement, and none is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.common.noise.philox import Purpose, first_word
from outrider.common.sampling.support import sample_support, support_prob
from outrider.common.tree import Tree, check_parents
from outrider.common.types import SamplingParams, Support, TokenIds
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.draw_chances import DrawChances, without
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder, make_draw
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget, TreeCosts, TreeDraft

BUDGET = TreeBudget(num_nodes=16, max_depth=6, max_width=3)
START = 40
SAMPLED = SamplingParams(temperature=0.8, seed=5)


class RandomSupports:
    """A distribution after each path, a function of the path; some are certain, after some there is none."""

    def __init__(self, seed: int) -> None:
        self._seed, self.num_runs = seed, 0

    def expand(self, paths: Sequence[TokenIds]) -> list[Support | None]:
        self.num_runs += 1
        return [self.support(path) for path in paths]

    def support(self, path: TokenIds) -> Support | None:
        rng = random.Random(repr((self._seed, path)))
        if path and rng.random() < 0.1:
            return None
        count = rng.choice((1, 2, 5, 16))
        weights = sorted((rng.randint(1, 9000) for _ in range(count)), reverse=True)
        return Support(tuple(rng.sample(range(100), count)), tuple(weights))


def build(
    source: RandomSupports,
    budget: TreeBudget = BUDGET,
    sampling: SamplingParams = SAMPLED,
    chances: DrawChances | None = None,
) -> tuple[TreeDraft, list[tuple[Support, int]]]:
    """The tree, and the draws in their order."""
    draws: list[tuple[Support, int]] = []
    draw = make_draw(sampling, START)

    def noted(left: Support, number: int) -> int:
        assert number == len(draws)
        draws.append((left, draw(left, number)))
        return draws[-1][1]

    return DrawnTreeBuilder(noted, chances or DrawChances(), budget).build(source), draws


@pytest.mark.parametrize("seed", range(30))
def test_children_are_drawn_without_replacement_and_all_that_was_drawn_is_sent(seed: int) -> None:
    source = RandomSupports(seed)
    draft, draws = build(source)
    tree = Tree(draft.parents)
    check_parents(draft.parents, draft.token_ids, BUDGET.num_nodes)
    assert max(tree.depths) < BUDGET.max_depth and source.num_runs <= BUDGET.max_depth
    assert len(draws) == len(draft.token_ids) == len(draft.values)
    assert len(draft.supports) == len(tree.internal)
    expected = []
    for node, support in zip(tree.internal, draft.supports, strict=True):
        assert support == source.support(tuple(draft.token_ids[each] for each in tree.path(node)))
        assert len(tree.children(node)) <= BUDGET.max_width
        for child in tree.children(node):
            expected.append((support, draft.token_ids[child]))
            support = without(support, draft.token_ids[child])
    assert sorted(map(repr, expected)) == sorted(map(repr, draws))
    for number, (left, token_id) in enumerate(draws):
        assert token_id == sample_support(left, first_word(SAMPLED.seed, Purpose.DRAFT, START, number))


def test_the_first_path_begins_with_what_is_proposed_as_a_chain() -> None:
    for seed in range(20):
        draft, _ = build(RandomSupports(seed))
        root = RandomSupports(seed).support(())
        assert root is not None
        assert draft.token_ids[0] == sample_support(root, first_word(SAMPLED.seed, Purpose.DRAFT, START, 0))


def test_at_temperature_0_the_likeliest_are_taken() -> None:
    for seed in range(10):
        draft, _ = build(RandomSupports(seed), sampling=SamplingParams(temperature=0.0))
        tree = Tree(draft.parents)
        for node, support in zip(tree.internal, draft.supports, strict=True):
            children = [draft.token_ids[child] for child in tree.children(node)]
            assert [support_prob(support, each) for each in children] == sorted(
                (weight / sum(support.weights) for weight in support.weights), reverse=True
            )[: len(children)]


def test_nodes_are_left_out_undrawn_where_they_cost_more_than_they_bring() -> None:
    sizes = []
    for node_s in (1e-6, 0.02, 0.1, 10.0):
        draft, draws = build(RandomSupports(3), TreeBudget(16, 6, 3, TreeCosts(0.1, node_s)))
        assert len(draws) == len(draft.token_ids)
        sizes.append(len(draws))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16 and 1 <= sizes[-1] <= 2


def test_a_budget_of_nothing_and_a_source_without_anything_give_no_nodes() -> None:
    class Nothing(RandomSupports):
        def support(self, path: TokenIds) -> Support | None:
            return None

    for draft, draws in (build(RandomSupports(1), TreeBudget(0, 6, 3)), build(Nothing(1))):
        NodeValues().observe(draft, (), 5)
        assert draft == TreeDraft((), (), num_runs=draft.num_runs) and not draws


def test_unsure_nodes_get_siblings_and_sure_ones_a_longer_path() -> None:
    class Alike(RandomSupports):
        def __init__(self, weights: tuple[int, ...]) -> None:
            super().__init__(0)
            self._weights = weights

        def support(self, path: TokenIds) -> Support:
            return Support(tuple(range(len(self._weights))), self._weights)

    budget = TreeBudget(16, 16, 4)
    sure, unsure = (Tree(build(Alike(each), budget)[0].parents) for each in ((10**6, 1), (5, 4)))
    assert max(sure.depths) > max(unsure.depths)
    assert len(unsure.children(-1)) == 2


def test_chances_learn_from_what_was_judged_alone() -> None:
    chances = DrawChances()
    support = Support((1, 2, 3), (6, 3, 1))
    draft = TreeDraft((1, 9, 2, 3), (), supports=(support, Support((9,), (1,))), parents=(-1, 0, -1, -1))
    before = [chances.chance(number, prob) for number, prob in ((0, 0.6), (1, 0.75), (2, 1.0), (0, 1.0))]
    for _ in range(50):
        chances.observe(draft, (2,), 7)  # the second child of the root, which is a leaf
    first, second, third, below = (
        chances.chance(number, prob) for number, prob in ((0, 0.6), (1, 0.75), (2, 1.0), (0, 1.0))
    )
    assert first < 0.2 and second > 0.85
    assert (third, below) == (before[2], before[3]), "neither was judged"
    for _ in range(50):
        chances.observe(draft, (0,), 7)  # and its child was rejected
        chances.observe(draft, (0,), None)  # it ended the text: nothing was judged after it
    assert chances.chance(0, 0.6) > 0.5 and chances.chance(0, 1.0) < 0.3


def test_the_mean_chance_is_that_of_what_may_be_drawn() -> None:
    chances = DrawChances()
    left = Support((4, 5), (3, 1))
    expected = 0.75 * chances.chance(1, 0.75) + 0.25 * chances.chance(1, 0.25)
    assert chances.mean_chance(1, left) == pytest.approx(expected)


def test_prompt_lookup_draws_by_how_often_a_token_followed() -> None:
    model = PromptLookupModel(100, "")
    sequence = model.sequence(SAMPLED, num_support=16)
    sequence.commit([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2])
    draft = sequence.propose_tree(BUDGET, NodeValues())
    assert draft.supports[0] == Support((3, 4), (2, 1))
    assert sorted(draft.token_ids[child] for child in Tree(draft.parents).children(-1)) == [3, 4]
