"""Rounds that heads would have, from their choices alone: under `coupled` the text does not depend on them."""

from collections.abc import Sequence
from itertools import product
from math import prod

from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Ranks
from outrider.training.calibrate_tree import Accuracies

Choices = list[list[int]]
"""Of each new token of a text but the last, the heads' choices that the tokens after it are: at most one a head, and
`MAX_CONTINUATIONS` where a token is none of them."""


def replayed_tokens_a_round(texts: Sequence[Choices], shape: Sequence[Ranks]) -> float:
    """Returns the tokens that a round commits on average, correction or bonus included, over whole texts."""
    nodes, num_tokens, num_rounds = set(shape), 0, 0
    for choices in texts:
        at = 0
        while at < len(choices):
            path = tuple(choices[at])
            num_accepted = next(
                depth for depth in range(len(path), -1, -1) if not depth or path[:depth] in nodes
            )
            at += min(num_accepted + 1, len(choices) - at)
            num_rounds += 1
        num_tokens += len(choices)
    return num_tokens / max(1, num_rounds)


def cartesian_widths(accuracies: Accuracies, num_nodes: int) -> tuple[int, ...]:
    """Returns the children of a node, level by level, of the best tree of at most so many nodes in which all nodes of
    a level have equally many (Medusa, section 2.1.2)."""
    every = (
        widths
        for depth in range(1, len(accuracies) + 1)
        for widths in product(range(1, MAX_CONTINUATIONS + 1), repeat=depth)
        if sum(prod(widths[:level]) for level in range(1, depth + 1)) <= num_nodes
    )
    return max(every, key=lambda widths: expected_tokens(accuracies, cartesian_shape(widths)))


def cartesian_shape(widths: Sequence[int]) -> tuple[Ranks, ...]:
    """Returns the nodes of that tree."""
    levels = range(1, len(widths) + 1)
    return tuple(path for level in levels for path in product(*map(range, widths[:level])))


def expected_tokens(accuracies: Accuracies, shape: Sequence[Ranks]) -> float:
    """Returns the tokens that a round commits: the nodes' values, products along their paths, and one."""
    return 1 + sum(prod(accuracies[depth][rank] for depth, rank in enumerate(path)) for path in shape)
