"""The cost model at many acceptance rates and draft lengths at once, as arrays, for the choice of the mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.edge_client.controller.cost_model import expected_tokens
from outrider.edge_client.controller.cost_model_pipelined import (
    PipelinedTimes,
    Run,
    branching_run_token_s,
)
from outrider.edge_client.controller.tree_policy import tree_tokens
from outrider.edge_client.drafting.trees import TreeCosts

Rates = tuple[float, ...]  # acceptance rates below 1


def rounds_token_s(rates: Rates, times: Sequence[PipelinedTimes]) -> NDArray[np.float64]:
    """Returns seconds a token of rounds one at a time, [rates, lengths]."""
    lengths = tuple(each.num_draft_tokens for each in times)
    return np.array([each.first_s for each in times]) / _expected_tokens(rates, lengths)


def branching_token_s(rates: Rates, times: Sequence[PipelinedTimes], hit_share: float) -> NDArray[np.float64]:
    """Returns `cost_model_pipelined.branching_token_s`, [rates, lengths]."""
    runs = _runs(rates, [each.num_draft_tokens for each in times])
    all_times = PipelinedTimes._make(map(np.array, zip(*times, strict=True)))
    num_waits = 0.0
    if any(each.wait_s for each in times):
        num_waits = _runs(rates, [each.window * each.num_draft_tokens for each in times]).rounds
    return np.asarray(branching_run_token_s(runs, num_waits, all_times, hit_share))


def tree_token_s(rates: Rates, costs: TreeCosts, max_nodes: int) -> NDArray[np.float64]:
    """Returns seconds a token of the fastest tree of at most `max_nodes` nodes, [rates], for one rate at every
    depth."""
    table = (costs.round_s + np.arange(1, max_nodes + 1) * costs.node_s) / _tree_tokens(rates, max_nodes)
    fastest: NDArray[np.float64] = table.min(axis=1)
    return fastest


@lru_cache(64)
def _expected_tokens(rates: Rates, lengths: tuple[int, ...]) -> NDArray[np.float64]:
    return np.array([[expected_tokens(rate, length) for length in lengths] for rate in rates])


def _runs(rates: Rates, lengths: Sequence[int]) -> Run:
    """Returns the parts of runs: tokens [rates, 1], the others [rates, lengths]. At one rate they are geometric sums.
    They are not kept: a window's lengths are many."""
    alphas = np.array(rates)[:, None]
    whole = alphas ** np.array(lengths)
    rounds = whole / (1 - whole)
    return Run._make((alphas / (1 - alphas), rounds, (1 - alphas) * rounds))


@lru_cache(16)
def _tree_tokens(rates: Rates, max_nodes: int) -> NDArray[np.float64]:
    """Returns the tokens of a round of 1, 2, … nodes, [rates, max_nodes]."""
    return np.array([tree_tokens((rate,), max_nodes)[1:] for rate in rates])
