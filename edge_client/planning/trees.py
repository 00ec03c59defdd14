"""Predicts rounds that are trees, by the cost model that `--tree auto` decides by. Pure.

The most valuable nodes by the acceptance rate and the controller's shares of later choices make the tree; what it costs
is a line over its nodes (`outrider.edge_client.controller.tree_policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import best_nodes, tree_costs
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH

TREE_SIZES = (8, 16, 32, 64)  # nodes of the trees that a plan considers
_MIN_ALPHA = 0.01  # a draft that is never right has no later choices either


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Holds rounds of trees of one size."""

    num_nodes: int
    tokens_per_round: float
    round_s: float
    verify_s: float

    @property
    def token_s(self) -> float:
        """Returns seconds a committed token."""
        return self.round_s / self.tokens_per_round


def tree_plan(
    num_nodes: int,
    alphas: Sequence[float],
    models: ModelCosts,
    link: LinkCosts,
    draft_line: tuple[float, float],
) -> TreePlan:
    """Returns the plan for trees of `num_nodes`, drafted in a time that is a line (base, a node) in seconds."""
    tokens = sum(accepted_chances(alphas, num_nodes))
    round_s = tree_round_s(num_nodes, models, link, draft_line)
    return TreePlan(num_nodes, tokens, round_s, tree_verify_s(num_nodes, models))


def accepted_chances(alphas: Sequence[float], num_nodes: int, max_depth: int = DEFAULT_DEPTH) -> list[float]:
    """Returns the chance that at least 0, 1, … tokens of the best tree are accepted; their sum is the tokens that a
    round commits. `alphas` are by position; the last one repeats."""
    chances = [1.0] + [0.0] * min(max_depth, num_nodes)
    if max_depth > 0:
        rates = [max(_MIN_ALPHA, alpha) for alpha in alphas]
        for value, depth in islice(best_nodes(rates, max_depth), num_nodes):
            chances[depth + 1] += value
    return chances


def tree_round_s(
    num_nodes: int, models: ModelCosts, link: LinkCosts, draft_line: tuple[float, float]
) -> float:
    """Returns how long a round takes whose draft is a tree."""
    costs = tree_costs(models, link, draft_line)
    more_s = tree_verify_s(num_nodes, models) - _linear_verify_s(num_nodes, models)
    return costs.round_s + num_nodes * costs.node_s + more_s


def tree_verify_s(num_nodes: int, models: ModelCosts) -> float:
    """Returns the time of verifying a tree: its rows may be bound by compute."""
    return max(_linear_verify_s(num_nodes, models), (num_nodes + 1) * models.verify_row_s)


def _linear_verify_s(num_nodes: int, models: ModelCosts) -> float:
    """Returns the time of verifying a tree whose rows are not bound by compute, which `tree_costs` assumes."""
    return models.verify_fixed_s + num_nodes * SETTINGS.tree_row_ratio * models.verify_token_s
