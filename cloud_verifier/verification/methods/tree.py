"""Shared by the methods for trees: the path that is accepted. Nodes and rows: see `chain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.cloud_verifier.verification.methods.base import RoundInput
from outrider.cloud_verifier.verification.methods.chain import judge_in_order
from outrider.common.tree import ROOT, Tree


def follow(round_input: RoundInput, tree: Tree, choose: Callable[[int], int | None]) -> list[int]:
    """Returns the nodes that `choose` leads through, root first: it returns the child to go to from a node, None to
    stay there. A stop id ends a path, and so does a node without a row."""
    nodes = list[int]()
    while (child := choose(nodes[-1] if nodes else ROOT)) is not None:
        nodes.append(child)
        if round_input.is_last(child):
            break
    return nodes


def follow_sample(round_input: RoundInput, tree: Tree) -> list[int]:
    """Returns the nodes that the target's own samples lead through, root first."""
    tokens, rows = round_input.draft_tokens, round_input.rows
    return follow(round_input, tree, lambda node: tree.child(node, tokens, rows.target_sample(node + 1)))


def longest_accepted(round_input: RoundInput, accepts: Callable[[int], bool]) -> Sequence[int]:
    """Returns the first tokens of a chain, or the longest path of a tree, that `accepts` all takes; of equally long
    paths the likeliest by p.

    So Medusa's code chooses (Cai et al. 2024, `evaluate_posterior`). A stop id ends a path.
    """
    if (tree := round_input.tree) is None:
        return judge_in_order(round_input, accepts)
    tokens, rows = round_input.draft_tokens, round_input.rows
    # Length and log p of each path that passes so far.
    passed: dict[int, tuple[int, float]] = {ROOT: (0, 0.0)}
    for node, parent in enumerate(tree.parents):
        if parent not in passed or (parent != ROOT and tokens[parent] in round_input.stop_ids):
            continue
        if accepts(node):
            (log_prob,) = rows.log_probs(parent + 1, (tokens[node],))
            length, log_probs = passed[parent]
            passed[node] = length + 1, log_probs + log_prob
    return tree.path(max(passed, key=lambda node: passed[node]))
