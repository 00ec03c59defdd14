"""Whether a round drafts a tree, and what its nodes have to be worth. Pure.

The target's token is the draft's k-th choice less and less often: of those that are left, the second choice takes
`second_choice_share` and each later one `later_choice_share`. The most valuable m nodes by these rates, whatever path
they are on, commit `tree_tokens` a round. A round of m nodes takes a line over m, so there is a best m; where its rate
is above that of the best chain, the round is a tree, and the draft itself decides which nodes, by its own scores
(`outrider.edge_client.drafting.tree_builder`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, fastest_round
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.trees import TreeCosts


def tree_tokens(alphas: Sequence[float], max_nodes: int) -> list[float]:
    """Returns the tokens that a round of 0, 1, … `max_nodes` nodes commits, the correction or bonus included: with
    their most valuable tree, where a first choice is accepted with the probability in `alphas` at its depth (the last
    one repeats)."""
    total, totals = 1.0, [1.0]
    for value, _ in islice(best_nodes(alphas), max_nodes):
        total += value
        totals.append(total)
    return totals


def best_nodes(alphas: Sequence[float], max_depth: int | None = None) -> Iterator[tuple[float, int]]:
    """Yields the value and the depth (0: a child of the root) of each node, the most valuable first, without end; see
    `tree_tokens`. No path has more than `max_depth` nodes, at least 1."""
    last = len(alphas) - 1
    # Value, depth, and how many choices come before it: the next choice is opened when it is taken, and so is the
    # first one after it.
    waiting = [(-alphas[0], 0, 0)]
    while True:
        value, depth, rank = heapq.heappop(waiting)
        yield -value, depth
        alpha, below = alphas[min(depth, last)], alphas[min(depth + 1, last)]
        heapq.heappush(waiting, (value * _next_share(alpha, rank), depth, rank + 1))
        if max_depth is None or depth + 1 < max_depth:
            heapq.heappush(waiting, (value * below, depth + 1, 0))


def choice_rates(alpha: float, num_choices: int) -> list[float]:
    """Returns how often each choice of the draft is the target's token, where the first is with the probability
    `alpha` above 0."""
    rates = [alpha]
    while len(rates) < num_choices:
        rates.append(rates[-1] * _next_share(alpha, len(rates) - 1))
    return rates


def _next_share(alpha: float, rank: int) -> float:
    """Returns the rate of the choice after `rank`, relative to that one's: at most 1."""
    share, later = SETTINGS.second_choice_share, SETTINGS.later_choice_share
    if rank == 0:
        return min(1.0, share * (1 - alpha) / alpha)
    left = 1 - share if rank == 1 else 1 - later
    return later * left / (share if rank == 1 else later)


def fastest_tree_s(alphas: Sequence[float], costs: TreeCosts, max_nodes: int) -> float:
    """Returns seconds a token of the fastest tree. Each node adds less than the one before, so times have one
    minimum: nodes are added until one makes them longer."""
    total, fastest_s = 1.0, math.inf
    for num_nodes, (value, _) in enumerate(islice(best_nodes(alphas), max_nodes), start=1):
        total += value
        token_s = (costs.round_s + num_nodes * costs.node_s) / total
        if token_s >= fastest_s:
            break
        fastest_s = token_s
    return fastest_s


class TreePolicy:
    """Decides for `--tree auto`, by the conditions that the session observes."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._totals: list[float] = []  # tokens of a round, by nodes, at the last decision for trees
        self.costs: TreeCosts | None = None
        """What the next rounds' nodes have to be worth; None where chains are expected to be as fast, and until the
        costs are known."""

    def plan(self, max_nodes: int) -> None:
        """Decides again, by what was observed so far, with trees of at most `max_nodes` nodes."""
        self.costs = self._decide(max_nodes) if max_nodes > 0 and self._conditions.are_known else None

    def observe(self, record: RoundRecord) -> None:
        """Learns from a tree what trees bring and take, beside what is expected of them."""
        num_nodes, costs = record.num_draft_tokens, self.costs
        is_tree = record.main_path is not None and record.is_answered and record.rtt_ms > 0
        if is_tree and costs is not None and 0 < num_nodes < len(self._totals):
            seconds = (record.draft_ms + (record.edge_ms or 0.0) + record.rtt_ms) / 1e3
            expected_s, expected_tokens = costs.round_s + num_nodes * costs.node_s, self._totals[num_nodes]
            num_tokens = record.num_accepted_tokens + 1
            self._conditions.observe_tree(num_tokens, expected_tokens, seconds, expected_s)
        elif record.is_answered:
            self._conditions.observe_no_tree()

    def _decide(self, max_nodes: int) -> TreeCosts | None:
        models, link = self._conditions.estimate()
        known = self._conditions.costs
        costs = tree_costs(models, link, known.tree_draft_line(), known.stated_token_s)
        alphas = self._conditions.acceptance.by_position()
        _, chain_rate = fastest_round(alphas, models, link, MAX_DEPTH)
        token_s = fastest_tree_s(alphas, costs, max_nodes) / self._conditions.tree_yield
        if token_s * (1 + SETTINGS.min_tree_gain_share) >= 1 / chain_rate:
            return None
        self._totals = tree_tokens(alphas, max_nodes)
        return costs


def tree_costs(
    models: ModelCosts, link: LinkCosts, draft_line: tuple[float, float], stated_token_s: float = 0.0
) -> TreeCosts:
    """Returns the costs of a round whose draft takes a line over its nodes, (base, a node) in seconds, beyond what
    the edge does besides.

    A tree has several times the tokens of the rounds through which the verifier's line was drawn, where a slope of
    nothing may be chance: a node takes no less than the verifier states of a token, `stated_token_s`.
    """
    base_s, draft_node_s = draft_line
    return TreeCosts(
        round_s=link.rtt_s + link.transfer_s(0) + models.verify_fixed_s + models.draft_fixed_s + base_s,
        node_s=SETTINGS.tree_row_ratio * max(models.verify_token_s, stated_token_s)
        + draft_node_s
        + link.draft_token_bytes_up / link.rate_up,
    )
