"""When a round is a tree, and how large it gets: by the cost model, and by the values of its nodes."""

from __future__ import annotations

import itertools

import pytest

from outrider.common.errors import ConfigError, UsageError
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.config.tree import tree_budget, tree_use
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.cost_model import expected_tokens
from outrider.edge_client.controller.mode_policy import ModePolicy
from outrider.edge_client.controller.pace_tables import tree_token_s
from outrider.edge_client.controller.round_costs import StepTimes
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import TreePolicy, fastest_tree_s, tree_tokens
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import DEFAULT_NODES, Continuations, TreeBudget, TreeCosts

PLENTY = TreeBudget(64, 12, 4)


def best_by_trying(alpha: float, num_nodes: int) -> float:
    """The tokens of the most valuable tree, by every node of four choices and few levels."""
    share, later = SETTINGS.second_choice_share, SETTINGS.later_choice_share
    second = min(alpha, share * (1 - alpha))  # a second choice is no likelier than the first
    third = second / share * (1 - share) * later
    rates = [alpha, second, third, third * (1 - later)]
    values = [
        value
        for depth in range(1, 6)
        for path in itertools.product(rates, repeat=depth)
        if (value := _product(path))
    ]
    return 1 + sum(sorted(values, reverse=True)[:num_nodes])


def _product(values: tuple[float, ...]) -> float:
    total = 1.0
    for each in values:
        total *= each
    return total


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7])
def test_a_trees_tokens_are_those_of_its_most_valuable_nodes(alpha: float) -> None:
    totals = tree_tokens((alpha,), 12)
    assert totals[0] == 1 and len(totals) == 13
    for num_nodes in (1, 3, 5):
        assert totals[num_nodes] == pytest.approx(best_by_trying(alpha, num_nodes))
    for num_nodes in range(13):
        assert totals[num_nodes] >= expected_tokens(alpha, num_nodes) - 1e-12


def test_of_sure_drafts_a_tree_is_a_chain() -> None:
    assert tree_tokens((0.99,), 20)[20] == pytest.approx(expected_tokens(0.99, 20))


def token_s(alpha: float, costs: TreeCosts, max_nodes: int) -> float:
    (seconds,) = tree_token_s((alpha,), costs, max_nodes)
    return float(seconds)


def test_the_best_tree_grows_with_the_round_and_shrinks_with_what_a_node_takes() -> None:
    slow, dear = TreeCosts(0.2, 0.0002), TreeCosts(0.2, 0.02)
    near = TreeCosts(0.01, 0.0002)
    assert token_s(0.8, slow, 64) < token_s(0.8, slow, 16) < token_s(0.8, slow, 4)
    assert token_s(0.8, dear, 64) == token_s(0.8, dear, 16)
    assert token_s(0.8, near, 64) < token_s(0.8, slow, 64)


@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("node_s", [1e-6, 1e-4, 0.003, 0.02])
@pytest.mark.parametrize("max_nodes", [1, 2, 16, 64])
def test_the_fastest_tree_is_found_among_all_sizes(alpha: float, node_s: float, max_nodes: int) -> None:
    costs, totals = TreeCosts(round_s=0.02, node_s=node_s), tree_tokens([alpha], max_nodes)
    times = [(costs.round_s + n * costs.node_s) / totals[n] for n in range(1, max_nodes + 1)]
    assert token_s(alpha, costs, max_nodes) == pytest.approx(min(times))
    assert fastest_tree_s([alpha], costs, max_nodes) == pytest.approx(min(times))


def observed(rtt_ms: float, row_ms: float, num_rounds: int = 8) -> Conditions:
    """After rounds of chains of several lengths, 7 in 9 accepted."""
    conditions = Conditions()
    for number in range(num_rounds):
        length = 4 + number % 5
        verifier_ms = 5.0 + row_ms * (length + 1)
        conditions.observe(
            RoundRecord(
                number,
                length,
                num_accepted_tokens=min(length, 3 + number % 2),
                draft_ms=0.2 * length,
                rtt_ms=rtt_ms + verifier_ms,
                net_ms=rtt_ms,
                forward_ms=verifier_ms,
                verifier_ms=verifier_ms,
            )
        )
    return conditions


def planned(conditions: Conditions) -> TreeCosts | None:
    policy = TreePolicy(conditions)
    policy.plan(64)
    return policy.costs


def test_a_round_is_a_tree_over_a_long_link_and_a_chain_where_rows_are_dear() -> None:
    assert planned(Conditions()) is None, "nothing is known"
    costs = planned(observed(rtt_ms=100, row_ms=0.05))
    assert costs is not None
    assert costs.round_s == pytest.approx(0.105, rel=0.05)
    assert 0 < costs.node_s < 0.001
    assert planned(observed(rtt_ms=0.3, row_ms=3.0)) is None


def test_rows_that_seem_free_in_short_rounds_cost_what_the_verifier_states() -> None:
    """By chance a line through rounds of four to eight tokens has no slope."""
    conditions = observed(rtt_ms=100, row_ms=0.0)
    assert planned(conditions) is not None
    conditions.costs.observe_opening(0.005, StepTimes(0.005, 0.003))
    assert planned(conditions) is None


def test_what_trees_take_to_draft_is_learned_from_trees() -> None:
    conditions = observed(rtt_ms=100, row_ms=0.05)
    before = conditions.costs.tree_draft_line()[1]
    for number in range(6):
        nodes = 20 + 8 * number
        conditions.observe(
            RoundRecord(99 + number, nodes, 4, draft_ms=nodes * 1.0, rtt_ms=110, net_ms=100, main_path=(3, 5))
        )
    assert conditions.costs.tree_draft_line()[1] == pytest.approx(0.001, rel=0.05) != before
    assert conditions.acceptance.overall() < 0.9, "the main path's acceptance counts, not that of all nodes"


def test_rates_may_differ_by_depth() -> None:
    assert tree_tokens((0.8, 0.5), 1)[1] == 1.8
    assert tree_tokens((0.3, 0.9), 30)[30] > tree_tokens((0.3,), 30)[30]


def test_what_trees_bring_beside_what_was_expected_is_learned() -> None:
    conditions = observed(rtt_ms=100, row_ms=0.05)
    policy = TreePolicy(conditions)
    policy.plan(64)
    assert conditions.tree_yield == 1
    assert policy.costs is not None
    expected_ms = 1e3 * (policy.costs.round_s + 64 * policy.costs.node_s)
    for number in range(200):
        policy.observe(RoundRecord(number, 64, 15, rtt_ms=expected_ms, main_path=(3, 5)))
    found = conditions.tree_yield
    assert found == pytest.approx(16 / policy._totals[64], rel=0.05)
    policy.observe(RoundRecord(200, 5, 5, rtt_ms=110))
    assert conditions.tree_yield == pytest.approx(found, rel=0.01) and found > 1.2
    for number in range(200):
        policy.observe(RoundRecord(number, 64, 15, rtt_ms=2 * expected_ms, main_path=(3, 5)))
    assert conditions.tree_yield == pytest.approx(found / 2, rel=0.05)
    for number in range(300):
        policy.observe(RoundRecord(number, 5, 5, rtt_ms=110))
    assert conditions.tree_yield == pytest.approx(1, rel=0.05), "so that trees are tried again"


def test_the_choice_of_the_mode_takes_trees_into_account() -> None:
    modes = (ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED)
    expected = []
    for has_trees in (False, True):
        conditions = observed(rtt_ms=60, row_ms=0.05)
        choice = ModePolicy(modes, None, conditions, has_trees=has_trees)
        choice._num_observed = 8
        choice.choose(200)
        expected.append(choice.expected_ms[ExecutionMode.SPECULATIVE])
    assert expected[1] < 0.9 * expected[0]


class TellsTheSame:
    """Two choices after every path, the first far ahead."""

    def __init__(self, gap: float) -> None:
        self.num_runs, self._gap = 0, gap

    def expand(self, paths: list[tuple[int, ...]]) -> list[Continuations]:
        self.num_runs += 1
        return [Continuations((len(path), 100 + len(path)), (0.0, self._gap), "draft") for path in paths]


def built(costs: TreeCosts | None, gap: float = 0.6) -> int:
    budget = TreeBudget(PLENTY.num_nodes, PLENTY.max_depth, PLENTY.max_width, costs)
    return len(TreeBuilder(NodeValues(), budget).build([TellsTheSame(gap)]).token_ids)


def test_a_builder_stops_where_a_node_is_worth_less_than_its_time() -> None:
    assert built(None) == 64
    assert built(TreeCosts(0.1, 1e-9)) == 64
    sizes = [built(TreeCosts(0.1, node_s)) for node_s in (0.0002, 0.002, 0.02, 0.2)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1] >= 1
    assert built(TreeCosts(0.1, 10.0)) == 1, "an empty draft would be taken for one that has no proposal"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mode": "cloud-only"}, "no rounds"),
        ({"method": "block"}, "coupled, sparse or typical"),
        ({"method": "threshold"}, "coupled, sparse or typical"),
        ({"method": "sparse", "gate": "stop", "gate_entropy": 1.0}, "--gate stop and --method sparse"),
        ({"num_speculative_tokens": 4}, "takes the place of --num-speculative-tokens 4"),
        ({"gate": "stop", "gate_variance": 1.0}, "variance"),
        ({"gate": "commit", "gate_entropy": 1.0}, "--gate commit"),
    ],
)
def test_flags_that_do_not_go_with_trees_are_named(settings: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=f"--tree 16 .*{word}"):
        tree_budget(run_config(tree=16, **settings))


def test_bounds_without_a_tree_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--tree-depth 5 goes with --tree"):
        tree_budget(run_config(tree_depth=5, num_speculative_tokens=4))


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        ("auto", {}),
        ("auto", {"mode": "speculative", "pipeline": "off"}),
        ("auto", {"on_timeout": "wait", "temperature": 0.0}),
        ("off", {"num_speculative_tokens": 4}),
        ("off", {"depth_policy": "window"}),
        ("off", {"pipeline": "on"}),
        ("off", {"method": "sparse"}),
        ("off", {"gate": "stop", "gate_nll": 3.0}),
        ("off", {"gate": "commit", "gate_nll": 3.0}),
        ("off", {"draft_strategy": "prompt-lookup"}),
        ("off", {"mode": "co-located"}),
        ("off", {"mode": "cloud-only"}),
        ("off", {"tree": "off"}),
        (8, {"tree": 8}),
    ],
)
def test_trees_are_chosen_by_default_where_the_draft_length_is_free(
    use: str | int, settings: dict[str, object]
) -> None:
    config = run_config(**settings)
    assert tree_use(config) == use
    assert (tree_budget(config) is None) == (use == "off")


def test_the_size_of_a_tree_is_a_number_or_chosen() -> None:
    assert tree_budget(run_config(tree="off")) is None
    assert tree_budget(run_config(tree=False)) is None, "YAML's off"
    assert tree_budget(run_config(tree="16", tree_depth=5, tree_width=2)) == TreeBudget(16, 5, 2)
    auto = tree_budget(run_config(tree="auto"))
    assert auto is not None and auto.num_nodes == DEFAULT_NODES
    assert tree_budget(run_config(tree=8, gate="stop", gate_entropy=1.0)) is not None
    for size, method in ((8, "typical"), (8, "sparse"), ("auto", "sparse")):
        assert tree_budget(run_config(tree=size, method=method)) is not None
    with pytest.raises(UsageError, match="not with --method typical"):
        tree_budget(run_config(tree="auto", method="typical"))
    for wrong in (0, -3, "many", 2000):
        with pytest.raises(ConfigError, match=r"tree .*expected one of auto, off or an integer"):
            run_config(tree=wrong)
