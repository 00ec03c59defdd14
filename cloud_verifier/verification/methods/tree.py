"""Shared by the methods for trees: the path that is accepted, and the end of a round.

A node is an index into the draft; the row after node i is row i + 1, row 0 the one after the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.chain import mean_ratio
from outrider.common.tree import ROOT, Tree
from outrider.common.types import CorrectionKind


def tree_of(round_input: RoundInput) -> Tree:
    """Returns the draft's tree; a round without one is a bug (AssertionError)."""
    assert round_input.tree is not None, "the draft is a chain"
    return round_input.tree


def follow_sample(round_input: RoundInput) -> list[int]:
    """Returns the nodes that the target's own samples lead through, root first: at each the child that is the
    sample, up to a stop id."""
    tree, tokens, nodes, node = tree_of(round_input), round_input.draft_tokens, list[int](), ROOT
    while True:
        sampled = round_input.rows.target_sample(node + 1)
        child = next((each for each in tree.children(node) if tokens[each] == sampled), None)
        if child is None:
            return nodes
        nodes.append(child)
        if sampled in round_input.stop_ids:
            return nodes
        node = child


def longest_path(round_input: RoundInput, accepts: Callable[[int], bool]) -> list[int]:
    """Returns the longest path of nodes that `accepts` all takes; of equally long ones the likeliest by p.

    So Medusa's code chooses (Cai et al. 2024, `evaluate_posterior`). A stop id ends a path.
    """
    tree, tokens, rows = tree_of(round_input), round_input.draft_tokens, round_input.rows
    passed: dict[int, tuple[int, float]] = {
        ROOT: (0, 0.0)
    }  # length and log p of each path that passes so far
    for node, parent in enumerate(tree.parents):
        if parent not in passed or (parent != ROOT and tokens[parent] in round_input.stop_ids):
            continue
        if accepts(node):
            (log_prob,) = rows.log_probs(parent + 1, (tokens[node],))
            length, log_probs = passed[parent]
            passed[node] = length + 1, log_probs + log_prob
    return tree.path(max(passed, key=lambda node: passed[node]))


def node_prob(round_input: RoundInput, node: int) -> float:
    """Returns p of the draft token at `node`, after those on its path."""
    row = tree_of(round_input).parents[node] + 1
    (log_prob,) = round_input.rows.log_probs(row, (round_input.draft_tokens[node],))
    return math.exp(log_prob)


def conclude_path(
    round_input: RoundInput,
    nodes: Sequence[int],
    ratios: Sequence[float],
    correct: Callable[[int], int],
    *,
    has_always_bonus: bool = False,
) -> Outcome:
    """Returns the outcome for accepted nodes, as `chain.conclude` does for a number of tokens; `correct(row)`
    samples the correction."""
    last = nodes[-1] if nodes else ROOT
    kind, token_id = CorrectionKind.NONE, 0
    if last != ROOT and round_input.draft_tokens[last] in round_input.stop_ids:
        pass
    elif tree_of(round_input).children(last):
        kind, token_id = CorrectionKind.CORRECTION, correct(last + 1)
    elif has_always_bonus or not round_input.is_pipelined:
        kind, token_id = CorrectionKind.BONUS, round_input.rows.target_sample(last + 1)
    return Outcome(len(nodes), token_id, kind, mean_ratio(ratios), tuple(nodes))
